"""Where each output byte comes from and goes to, decided before any data is read."""
