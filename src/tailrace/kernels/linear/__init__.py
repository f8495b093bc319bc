"""Linear layers behind one small interface, so that a compiled kernel can replace them later."""
