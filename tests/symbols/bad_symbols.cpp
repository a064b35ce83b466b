// What the symbol checks must refuse: an external function outside the C ABI, and an inline
// function that the linker may take from any object.
namespace wrong {

[[gnu::noinline]] inline int shared_between_units(int x) { return x * x + 1; }

int outside_abi(int x);
int outside_abi(int x) { return shared_between_units(x); }

}  // namespace wrong
