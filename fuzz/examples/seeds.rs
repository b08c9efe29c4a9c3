//! Rewrites the kept seeds after a change of an encoding: `cargo run --manifest-path
//! fuzz/Cargo.toml --example seeds`.

use nccl_net_spark_fuzz::TARGETS;
use std::io;
use std::path::Path;

fn main() -> io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds");
    if root.exists() {
        std::fs::remove_dir_all(&root)?;
    }
    for target in TARGETS {
        let folder = root.join(target.name);
        std::fs::create_dir_all(&folder)?;
        for (name, bytes) in (target.seeds)() {
            std::fs::write(folder.join(name), bytes)?;
        }
    }
    Ok(())
}
