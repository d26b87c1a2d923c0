"""What models call: attention on torch tensors."""
