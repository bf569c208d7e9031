"""What every floor stands on: arguments, axes, files, signatures."""
