#include <onchip/onchip.h>
// A second inclusion must be harmless.
// NOLINTNEXTLINE(readability-duplicate-include)
#include <onchip/onchip.h>

static_assert(__cplusplus >= 202002L);
static_assert(ONCHIP_VERSION_MAJOR >= 0);
