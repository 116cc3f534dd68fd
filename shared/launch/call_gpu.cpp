#include "launch/call_gpu.h"

#include "kernels/grouped_mm/simt.h"
#include "launch/checks.h"

namespace multigemm {
namespace {

int64_t packed_bytes(const Operand& from) {
  return from.rows * packed_row(from.batch * from.columns, from.dtype) * dtype_bytes(from.dtype);
}

int64_t room_bytes(int64_t groups) { return simt::room_for(groups) * static_cast<int64_t>(sizeof(int64_t)); }

}  // namespace

void copy_operand(const Operand& from, void* to, int64_t row, int32_t as, void* stream) {
  check_gpu(simt::pack({from.data,
                        {from.stride[0], from.stride[1], from.stride[2]},
                        to,
                        row,
                        from.rows,
                        from.batch,
                        from.columns,
                        static_cast<int>(dtype_bytes(as)),
                        as == from.dtype ? 0 : from.dtype},
                       stream),
            "the kernel that copies an operand");
}

PackedRows::PackedRows(bool wanted, const Operand& from, const mg_host* host, void* stream)
    : memory_(host, stream, wanted ? packed_bytes(from) : 0) {
  if (wanted)
    copy_operand(from, memory_.as<void>(), packed_row(from.batch * from.columns, from.dtype), from.dtype, stream);
}

void run_simt(const mg_grouped_mm_problem& p) {
  const DeviceMemory room(p.host, p.stream, room_bytes(p.groups.count));
  check_gpu(simt::rows(p, room.as<int64_t>(), p.stream), "launching rows_simt");
}

void run_simt(const mg_grouped_mm_wgrad_problem& p) {
  const DeviceMemory room(p.host, p.stream, room_bytes(p.groups.count));
  check_gpu(simt::wgrad(p, room.as<int64_t>(), p.stream), "launching wgrad_simt");
}

}  // namespace multigemm
