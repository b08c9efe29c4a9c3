//! The modules of `crates/proto` that the plugin's threads use, unchanged. The name `std` stands
//! for the crate in the folder `../std`, which uses loom.

extern crate loom_std as std;

#[path = "../../../../crates/proto/src/flow/mod.rs"]
pub mod flow;
#[path = "../../../../crates/proto/src/time.rs"]
pub mod time;
#[path = "../../../../crates/proto/src/wire/mod.rs"]
pub mod wire;
