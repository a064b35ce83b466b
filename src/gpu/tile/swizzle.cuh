// Where a 16-bit matrix of 64-column chunks, [chunk][row][64], lies in shared memory under TMA's
// 128-byte swizzle, and how wgmma is told. Each chunk starts at a multiple of 1024 bytes.
#pragma once
#include "gpu/tile/ptx.cuh"

namespace onchip::tile {

inline constexpr int kChunkColumns = 64;
inline constexpr int kChunkRowBytes = 128;

// Byte offset of the 16-byte unit (eight columns) `unit` of a row: the low three bits of the row
// turn the units around, so that eight rows of one column block touch all 32 banks.
ONCHIP_DEVICE u32 swizzle_128b(u32 row, u32 unit) {
  return row * kChunkRowBytes + ((unit ^ (row & 7)) << 4);
}

// Low word of a wgmma matrix descriptor: address, and the leading byte offset, which counts only
// for matrices whose rows are the contraction ("MN-major"): the distance between 64-column chunks.
// Both in units of 16 bytes. The mask drops the block's rank, which a cluster puts above bit 24.
ONCHIP_DEVICE u32 descriptor_low(u32 address, u32 leading_bytes) {
  return ((address >> 4) & 0x3fff) | (leading_bytes >> 4 << 16);
}

// The high word, 0x40000040 (128-byte swizzle; 1024 bytes from one group of eight rows to the
// next), and the steps of the low word along the contraction stand in wgmma_shapes.cuh.

}  // namespace onchip::tile
