// A CUDA device without memory or kernels, for a build of torch that has none.
//
// The guard and the hooks are those of `capture/offline/absent_card.h`; attention takes the kernel that a test
// names.
//
// To be loaded before torch is imported: torch asks the hooks once and remembers the answer.

#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>

#include "absent_card.h"

#include <atomic>
#include <cstdint>
#include <optional>

namespace {

using absent_card::Guard;

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

std::atomic<int64_t> attention_kernel{0};

int64_t choose_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return attention_kernel;
}

const bool kChooses = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  return true;
}();

}  // namespace

namespace at {
namespace {

struct Hooks final : absent_card::Hooks {
  explicit Hooks(CUDAHooksArgs) {}
};

}  // namespace

C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks);

}  // namespace at

// Which kernel attention takes from now on: the number of a torch.nn.attention.SDPBackend.
extern "C" void fake_cuda_attention(int64_t kernel) { attention_kernel = kernel; }
