#include <onchip/onchip.h>
// A second inclusion must be harmless.
#include <onchip/onchip.h>

static_assert(__cplusplus >= 202002L);

const char* use_header_from_cxx();
const char* use_header_from_cxx() { return onchip_version(); }
