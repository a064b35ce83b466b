#include <onchip/onchip.hpp>
// A second inclusion must be harmless.
// NOLINTNEXTLINE(readability-duplicate-include)
#include <onchip/onchip.hpp>

static_assert(__cplusplus >= 202002L);
