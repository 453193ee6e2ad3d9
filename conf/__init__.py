"""Every key of a job with its default (`config.yaml` and the group files), and presets such as `sampling=creative`."""
