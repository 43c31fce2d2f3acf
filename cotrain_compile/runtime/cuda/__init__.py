"""CUDA: streams, pinned memory and the settings of a card. The one room that calls torch.cuda."""
