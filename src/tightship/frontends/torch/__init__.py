"""PyTorch training steps and fx graphs -> Program."""
