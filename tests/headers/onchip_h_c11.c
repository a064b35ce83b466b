#include <onchip/onchip.h>
/* A second inclusion must be harmless. */
#include <onchip/onchip.h>

#if __STDC_VERSION__ != 201112L
#error "this file checks the header as C11"
#endif

const char* use_header(void);
const char* use_header(void) { return onchip_version(); }
