"""What of the zoo is not asked of a device whose tensors are not the CPU's, and why."""

NOT_ON_A_GPU = {
    "custom-functions": "its functions make tensors on the CPU, and keep a parameter on their context",
    "interleaved": "torch.autograd.grad by parameters that stream",
    "penalty": "weights on two devices: a norm adds what each has",
    "replaced": "a weight in memory of the user's own on the CPU",
    "replaced-before-backward": "a weight in memory of the user's own on the CPU",
    "swapped": "a weight in memory of the user's own on the CPU",
    "user-memory": "a weight in memory of the user's own on the CPU",
    "writes": "numpy writes to no GPU's memory",
    "writes-before-backward": "numpy writes to no GPU's memory",
}
# `model.to(gpu)` parts weights that share memory.
PLAIN_ON_CPU = {"tied-by-storage", "overlapping", "untied"}
