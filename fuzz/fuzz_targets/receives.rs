//! See `nccl_net_spark_fuzz::receives`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nccl_net_spark_fuzz::receives::check(data);
});
