//! See `nccl_net_spark_fuzz::handle`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nccl_net_spark_fuzz::handle::check(data);
});
