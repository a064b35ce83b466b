#include <onchip/onchip.hpp>
// A second inclusion must be harmless.
#include <onchip/onchip.hpp>

static_assert(__cplusplus >= 202002L);
