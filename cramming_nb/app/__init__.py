"""What is made of a trained model, and the command line."""
