"""The mechanism of a GPU worker: model binding, layer, dispatch, cache, loader, device. It decides nothing."""
