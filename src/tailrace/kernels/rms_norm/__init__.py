"""Root-mean-square normalisation of rows, alone or after adding to the residual stream."""
