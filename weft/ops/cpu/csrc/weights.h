// Memory for packed weights, in pages of 2 MB if the system provides some.
//
// A decode step reads every weight once. Pages of 4 kB cost a TLB miss every 4 kB, which under a hypervisor is a walk
// through two sets of tables: 10 to 15% of the time of a product of one row.
//
//   region    2 MB aligned; tensors one behind another, because small tensors would not fill a page
//
// A region is freed with its last tensor. If the last tensor in a region is dropped, its place is reused: weights
// packed only to be copied need the place of one tensor. Unused space takes no memory.
#pragma once

#include "common.h"

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <mutex>

namespace weft {

class WeightRegion {
 public:
  explicit WeightRegion(size_t bytes) {
    void* const at =
        mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    WEFT_CHECK(at != MAP_FAILED, "there is no memory for ", bytes >> 20, " MB of packed weights");
    all_ = at, mapped_ = bytes + kPage, bytes_ = bytes;
    first_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(at) + kPage - 1) / kPage * kPage);
#if defined(MADV_HUGEPAGE)
    madvise(first_, bytes, MADV_HUGEPAGE);  // a kernel without huge pages refuses, and small pages are used
#endif
  }
  ~WeightRegion() { munmap(all_, mapped_); }
  WeightRegion(const WeightRegion&) = delete;
  WeightRegion& operator=(const WeightRegion&) = delete;

  // Returns `bytes` of free space in the region, or null.
  void* take(size_t bytes) {
    const size_t rounded = rounded_up(bytes);
    if (rounded > bytes_ - used_) return nullptr;
    used_ += rounded;
    return first_ + used_ - rounded;
  }

  // Frees the `bytes` at `at`.
  void give(void* at, size_t bytes) {
    if (static_cast<uint8_t*>(at) + rounded_up(bytes) == first_ + used_) used_ -= rounded_up(bytes);
  }

  static constexpr size_t kPage = size_t(2) << 20, kLeast = size_t(64) << 20;

 private:
  static constexpr size_t kAlign = 256;

  static size_t rounded_up(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

  void* all_;
  uint8_t* first_;
  size_t mapped_, bytes_, used_ = 0;
};

// Like `empty_tensor` on the CPU. From any thread.
inline Tensor empty_weights(Sizes sizes, Dtype type) {
  static std::mutex mutex;
  static std::weak_ptr<WeightRegion> newest;
  size_t bytes = size_t(bytes_of(type));
  for (const int64_t size : sizes) bytes *= size_t(size);
  if (bytes == 0) return empty_tensor(sizes, type);
  const std::lock_guard lock(mutex);
  std::shared_ptr<WeightRegion> region = newest.lock();
  void* at = region ? region->take(bytes) : nullptr;
  if (!at) {
    const size_t pages = (bytes + WeightRegion::kPage) / WeightRegion::kPage * WeightRegion::kPage;
    region = std::make_shared<WeightRegion>(std::max(pages, WeightRegion::kLeast));
    newest = region;
    at = region->take(bytes);
  }
  const auto drop = [region, bytes](void* place) {
    const std::lock_guard held(mutex);
    region->give(place, bytes);
  };
  return tensor_over(at, sizes, type, drop);
}

}  // namespace weft
