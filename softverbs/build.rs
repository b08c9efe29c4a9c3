//! Link arguments of the stand-in library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=ibverbs.map");
    let folder = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    // rustc gives a cdylib an anonymous version script, which excludes the versioned symbols that
    // `dlvsym` needs. So this package is a program, and the linker makes a shared object of it. The
    // library's soname differs from libibverbs' soname. With the same soname, the dynamic linker
    // would take a preloaded copy of this library for libibverbs, and not load libibverbs beside
    // it.
    for argument in [
        "-shared",
        &format!("-Wl,--version-script={folder}/ibverbs.map"),
        "-Wl,-soname,libsoftverbs-ibverbs.so.1",
        // The library's threads and thread-local values may outlive a program's `dlclose`.
        "-Wl,-z,nodelete",
        "-Wl,-z,now",
    ] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
}
