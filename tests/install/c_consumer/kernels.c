/* Every registered GPU kernel can be had without a compiler and a cache: from the archive. */
#include <onchip/onchip.h>
#include <stdio.h>

int main(void) {
  size_t length = 0;
  if (onchip_kernels_resources(NULL, NULL, 0, &length) != ONCHIP_OK) {
    fprintf(stderr, "kernels: %s\n", onchip_last_error());
    return 1;
  }
  return 0;
}
