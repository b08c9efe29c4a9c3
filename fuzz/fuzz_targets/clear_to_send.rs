//! See `nccl_net_spark_fuzz::clear_to_send`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nccl_net_spark_fuzz::clear_to_send::check(data);
});
