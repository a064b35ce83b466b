// pack_kernels <file>: writes the kernel archive. Run by the build (OnchipKernelArchive.cmake).
#include <onchip/onchip.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: pack_kernels <file>\n");
    return 2;
  }
  if (onchip_kernels_build(nullptr, argv[1]) != ONCHIP_OK) {
    std::fprintf(stderr, "%s\n", onchip_last_error());
    return 1;
  }
  return 0;
}
