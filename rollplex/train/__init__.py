"""Training: packed suffixes, their losses and gradients, the optimizer, checkpoints.

It turns scored samples into new weights. It deliberately does not know how the samples were decoded, when its phases
run, or what else is on the device.
"""
