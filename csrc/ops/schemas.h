// SPDX-License-Identifier: Apache-2.0
// The schemas of all ops. Both the library of the real ops and the library of the emulated kernels
// use these schemas. Mutated arguments are marked, and no op returns an alias.
#pragma once

namespace kvcache {

template <class Library>
void define_schemas(Library& m) {
  m.def(
      "slot_mapping(Tensor tables, Tensor groups, int num_rows, Tensor rows, "
      "Tensor? query_start_loc, Tensor positions, Tensor? num_blocks_per_row, Tensor(a!) out) "
      "-> ()");
  m.def("update_block_tables(Tensor(a!) tables, Tensor updates) -> ()");
  m.def(
      "gather_block_tables(Tensor tables, Tensor groups, int num_rows, Tensor idx_mapping, "
      "Tensor? num_computed_tokens, int max_num_tokens, Tensor(a!) out) -> ()");
  m.def(
      "attention_metadata(Tensor tables, Tensor groups, int num_rows, Tensor rows, "
      "Tensor query_lens, Tensor seq_lens, Tensor num_blocks_per_row, int max_num_tokens, "
      "Tensor(a!) query_start_loc, Tensor(b!) seqused_k, Tensor(c!)? block_tables=None, "
      "Tensor(d!)? paged_kv_indptr=None, Tensor(e!)? paged_kv_indices=None, "
      "Tensor(f!)? paged_kv_last_page_len=None) -> ()");
  m.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, "
      "int scale_rule=0) -> ()");
  m.def(
      "rope_write_kv(Tensor positions, Tensor(a!) query, Tensor key, Tensor value, "
      "Tensor cos_sin_cache, Tensor(b!) key_cache, Tensor(c!) value_cache, Tensor slot_mapping, "
      "Tensor(d!)? k_scale=None, Tensor(e!)? v_scale=None, int scale_rule=0, bool is_neox=True, "
      "bool rotates_value=False, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-6, "
      "Tensor(f!)? query_out=None, Tensor(g!)? key_out=None, Tensor(h!)? value_out=None) -> ()");
  m.def(
      "gather_kv(Tensor key_cache, Tensor value_cache, Tensor slot_mapping, Tensor(a!) key, "
      "Tensor(b!) value, Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def(
      "gather_context(Tensor key_cache, Tensor value_cache, Tensor block_tables, "
      "Tensor cu_seq_lens, Tensor(a!) key, Tensor(b!) value, Tensor? k_scale=None, "
      "Tensor? v_scale=None, Tensor? seq_starts=None, Tensor? positions=None) -> ()");
  m.def(
      "copy_blocks(Tensor? src, Tensor(a!) dst, Tensor regions, Tensor pairs, int num_src_blocks, "
      "int num_dst_blocks, int engine=0, int pages_per_run=0, int num_thread_blocks=0, "
      "Tensor[]? owners=None) -> ()");
  m.def(
      "permute_blocks_(Tensor(a!) cache, Tensor offsets, Tensor indices, int remote_block_size, "
      "bool remote_is_hnd, Tensor[]? owners=None) -> ()");
}

}  // namespace kvcache
