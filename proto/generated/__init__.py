"""Written by `make proto` from the `.proto` files beside; not to be edited."""
