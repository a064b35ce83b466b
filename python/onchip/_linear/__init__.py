"""The operators of linear attention, by engine; `onchip.ops` has them all."""
