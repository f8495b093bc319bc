"""What happens to q, k and v between projection and attention: norm, rotation, cache write."""
