//! The driver's own libcuda is loaded, not a toolkit's stub on `LD_LIBRARY_PATH`.

mod common;

use host::rails;
use std::path::Path;
use std::process::Command;

/// A toolkit's stub: each call fails with `CUDA_ERROR_STUB_LIBRARY`.
const STUB: &str = "
int cuInit(unsigned flags) { (void)flags; return 34; }
int cuDeviceGetCount(int *count) { *count = 0; return 34; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 34; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute + device; return 34; }
int cuDeviceGetName(char *name, int bytes, int device) { *name = 0; return 34 + 0 * (bytes + device); }
";

/// A driver with one GB10. Each attribute is 1 for an integrated GPU, otherwise 0.
const DRIVER: &str = "
#include <stdio.h>
int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 18; return device; }
int cuDeviceGetName(char *name, int bytes, int device) { snprintf(name, bytes, \"NVIDIA GB10\"); return device; }
";

fn shared_object(text: &str, folder: &Path, name: &str) {
    let source = folder.join("library.c");
    let library = folder.join(name);
    std::fs::write(&source, text).unwrap();
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let output = common::cc(&["-shared", "-fPIC", "-o", &path(&library), &path(&source)]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_stub_named_libcuda_so_does_not_hide_the_driver() {
    let folder = tempfile::tempdir().unwrap();
    shared_object(STUB, folder.path(), "libcuda.so");
    shared_object(DRIVER, folder.path(), "libcuda.so.1");
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "the_process_that_asks",
            "--ignored",
            "--nocapture",
        ])
        .env("LD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("GPU: NVIDIA GB10\n"), "{stdout}");
    assert!(
        stdout.contains("INTEGRATED=1 GPU_DIRECT_RDMA_SUPPORTED=0 DMA_BUF_SUPPORTED=0"),
        "{stdout}"
    );
}

#[test]
#[ignore = "a child process of the test above"]
fn the_process_that_asks() {
    println!("\nGPU: {}", rails::gpu_text(&rails::gpu_name()));
    println!("{}", rails::host_pointers_reason(&rails::cuda_devices()));
}
