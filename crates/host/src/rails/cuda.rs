//! CUDA's attributes of GPU memory, which explain why the plugin announces only host pointers. The
//! driver's library is loaded at run time, and no context is created.

#![allow(unsafe_code)]

use libloading::Library;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::OnceLock;

/// Attributes of a GPU. An attribute that the installed driver does not know is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaDevice {
    /// The GPU shares its memory with the CPU (`CU_DEVICE_ATTRIBUTE_INTEGRATED`).
    pub is_integrated: Option<bool>,
    /// nvidia-peermem can reach its memory (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED`).
    pub has_gpu_direct_rdma: Option<bool>,
    /// dma-buf can reach its memory (`CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`).
    pub has_dma_buf: Option<bool>,
    /// A NIC can reach memory of CUDA's virtual memory management
    /// (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`).
    pub has_vmm_rdma: Option<bool>,
}

/// Returns all GPUs that CUDA shows to this process, in CUDA's order.
///
/// # Errors
/// The reason as text: no libcuda, or a failed call.
pub fn cuda_devices() -> Result<Vec<CudaDevice>, String> {
    let driver = CudaDriver::load()?;
    (0..driver.count()?)
        .map(|ordinal| driver.device(ordinal))
        .collect()
}

/// Returns the name of the GPU that CUDA shows to this process. If CUDA shows GPUs with different
/// names, returns these names joined by `+`.
///
/// # Errors
/// The reason as text: no libcuda, no GPU, or a failed call.
pub fn gpu_name() -> Result<String, String> {
    let driver = CudaDriver::load()?;
    let mut names = (0..driver.count()?)
        .map(|ordinal| driver.name(ordinal))
        .collect::<Result<Vec<_>, _>>()?;
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        Err("CUDA shows no GPU".to_owned())
    } else {
        Ok(names.join("+"))
    }
}

/// Formats the result of [`gpu_name`] for a person.
pub fn gpu_text(name: &Result<String, String>) -> String {
    match name {
        Ok(name) => name.clone(),
        Err(reason) => format!("unknown GPU ({reason})"),
    }
}

/// Returns the reason why the plugin announces only host pointers, as one line for the log.
pub fn host_pointers_reason(devices: &Result<Vec<CudaDevice>, String>) -> String {
    const ANNOUNCED: &str = "host memory only, no GPUDirect";
    let devices = match devices {
        Err(reason) => return format!("{ANNOUNCED}: {reason}"),
        Ok(devices) if devices.is_empty() => return format!("{ANNOUNCED}: CUDA shows no GPU"),
        Ok(devices) => devices,
    };
    let mut kinds: Vec<(CudaDevice, Vec<String>)> = Vec::new();
    for (ordinal, device) in devices.iter().enumerate() {
        match kinds.iter_mut().find(|(kind, _)| kind == device) {
            Some((_, ordinals)) => ordinals.push(ordinal.to_string()),
            None => kinds.push((*device, vec![ordinal.to_string()])),
        }
    }
    let texts: Vec<String> = kinds
        .iter()
        .map(|(device, ordinals)| {
            format!(
                "GPU {}: INTEGRATED={} GPU_DIRECT_RDMA_SUPPORTED={} DMA_BUF_SUPPORTED={}",
                ordinals.join(","),
                digit(device.is_integrated),
                digit(device.has_gpu_direct_rdma),
                digit(device.has_dma_buf)
            )
        })
        .collect();
    let unreachable = |device: &CudaDevice| {
        device.has_gpu_direct_rdma != Some(true) && device.has_dma_buf != Some(true)
    };
    let reason = if devices.iter().all(unreachable) {
        "a NIC cannot reach this GPU memory, NCCL stages in pinned host memory"
    } else {
        "this plugin moves host memory, NCCL stages in pinned host memory"
    };
    format!("{ANNOUNCED}: {reason} ({})", texts.join("; "))
}

fn digit(value: Option<bool>) -> &'static str {
    match value {
        Some(true) => "1",
        Some(false) => "0",
        None => "unknown",
    }
}

fn succeeded(call: &str, status: c_int) -> Result<(), String> {
    match status {
        0 => Ok(()),
        // Values of CUresult (cuda.h) that a person can act on.
        34 => Err(format!(
            "{call}: the libcuda found is the toolkit's stub, not the driver's"
        )),
        100 => Err(format!("{call}: no GPU")),
        code => Err(format!("{call} gave CUresult {code}")),
    }
}

/// Names of the driver's library, in the order in which they are tried. CUDA's runtime loads the
/// soname `libcuda.so.1`. The name `libcuda.so` comes second, because a CUDA toolkit has a stub of
/// that name, which is on `LD_LIBRARY_PATH` in some images.
const LIBRARY_NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Values of cuda.h's `CUdevice_attribute`.
const INTEGRATED: c_int = 18;
const GPU_DIRECT_RDMA_SUPPORTED: c_int = 116;
const DMA_BUF_SUPPORTED: c_int = 124;
const GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: c_int = 110;

/// Functions of the driver. Their result type is an integer, so that an error code of a newer
/// driver is also a valid value.
struct CudaDriver {
    init: unsafe extern "C" fn(c_uint) -> c_int,
    device_count: unsafe extern "C" fn(*mut c_int) -> c_int,
    device_get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    device_name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
}

impl CudaDriver {
    /// Loads the library and initialises the driver.
    fn load() -> Result<Self, String> {
        // Never unloaded: libcuda keeps threads and state of its own.
        static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
        // SAFETY: loading runs libcuda's initialisers, which may run in any process.
        let load = |name| unsafe { Library::new(name) }.ok();
        let library = LIBRARY.get_or_init(|| LIBRARY_NAMES.into_iter().find_map(load));
        let library = library
            .as_ref()
            .ok_or_else(|| "libcuda not found".to_owned())?;
        let missing = |error: libloading::Error| format!("libcuda: {error}");
        // SAFETY: the types are those of cuda.h (CUresult and CUdevice_attribute are C enums,
        // CUdevice is an int), and the library is never unloaded.
        let driver = unsafe {
            Self {
                init: *library.get(b"cuInit\0").map_err(missing)?,
                device_count: *library.get(b"cuDeviceGetCount\0").map_err(missing)?,
                device_get: *library.get(b"cuDeviceGet\0").map_err(missing)?,
                attribute: *library.get(b"cuDeviceGetAttribute\0").map_err(missing)?,
                device_name: *library.get(b"cuDeviceGetName\0").map_err(missing)?,
            }
        };
        // SAFETY: `cuInit` may be called at any time, by any thread, repeatedly; its flags must be
        // 0.
        let status = unsafe { (driver.init)(0) };
        succeeded("cuInit", status)?;
        Ok(driver)
    }

    fn count(&self) -> Result<c_int, String> {
        let mut count: c_int = 0;
        // SAFETY: the pointer is to a live int, which the call writes.
        let status = unsafe { (self.device_count)(&mut count) };
        succeeded("cuDeviceGetCount", status)?;
        Ok(count)
    }

    fn handle(&self, ordinal: c_int) -> Result<c_int, String> {
        let mut device: c_int = 0;
        // SAFETY: the call writes the live int behind the pointer; a bad ordinal is an error code.
        let status = unsafe { (self.device_get)(&mut device, ordinal) };
        succeeded("cuDeviceGet", status)?;
        Ok(device)
    }

    fn name(&self, ordinal: c_int) -> Result<String, String> {
        let device = self.handle(ordinal)?;
        let mut name = [0; 256];
        // SAFETY: the call writes at most `name.len()` bytes; `device` is from cuDeviceGet.
        let status = unsafe { (self.device_name)(name.as_mut_ptr(), name.len() as c_int, device) };
        succeeded("cuDeviceGetName", status)?;
        Ok(name
            .iter()
            .take_while(|byte| **byte != 0)
            .map(|byte| char::from(*byte as u8))
            .collect())
    }

    fn device(&self, ordinal: c_int) -> Result<CudaDevice, String> {
        let device = self.handle(ordinal)?;
        let ask = |attribute: c_int| {
            let mut value: c_int = 0;
            // SAFETY: the call writes to a live int, and `device` is from cuDeviceGet.
            let status = unsafe { (self.attribute)(&mut value, attribute, device) };
            (status == 0).then_some(value != 0)
        };
        Ok(CudaDevice {
            is_integrated: ask(INTEGRATED),
            has_gpu_direct_rdma: ask(GPU_DIRECT_RDMA_SUPPORTED),
            has_dma_buf: ask(DMA_BUF_SUPPORTED),
            has_vmm_rdma: ask(GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB10: CudaDevice = CudaDevice {
        is_integrated: Some(true),
        has_gpu_direct_rdma: Some(false),
        has_dma_buf: Some(false),
        has_vmm_rdma: Some(false),
    };

    #[test]
    fn hosts_with_and_without_cuda_get_a_log_line() {
        let found = cuda_devices();
        let line = host_pointers_reason(&found);
        assert!(
            line.starts_with("host memory only, no GPUDirect: ") && !line.contains('\n'),
            "{line}"
        );
        assert_eq!(host_pointers_reason(&cuda_devices()), line, "asked twice");
    }

    #[test]
    fn a_gpu_is_named_or_a_reason_is_given() {
        assert_eq!(gpu_text(&Ok("NVIDIA GB10".to_owned())), "NVIDIA GB10");
        assert_eq!(
            gpu_text(&Err("libcuda not found".to_owned())),
            "unknown GPU (libcuda not found)"
        );
    }

    #[test]
    fn the_line_gives_the_reason_for_a_spark_and_for_a_gpu_with_gpudirect() {
        let line = host_pointers_reason(&Ok(vec![GB10]));
        assert!(line.contains("cannot reach"), "{line}");
        assert!(
            line.ends_with("(GPU 0: INTEGRATED=1 GPU_DIRECT_RDMA_SUPPORTED=0 DMA_BUF_SUPPORTED=0)"),
            "{line}"
        );
        let discrete = CudaDevice {
            is_integrated: Some(false),
            has_gpu_direct_rdma: Some(true),
            has_dma_buf: None,
            has_vmm_rdma: None,
        };
        let line = host_pointers_reason(&Ok(vec![discrete, discrete]));
        assert!(
            line.contains("moves host memory") && line.contains("GPU 0,1:"),
            "{line}"
        );
        assert!(line.contains("DMA_BUF_SUPPORTED=unknown"), "{line}");
        assert!(
            host_pointers_reason(&Err("libcuda not found".into())).contains("libcuda not found")
        );
    }
}
