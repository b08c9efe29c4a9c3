//! Charts, each as SVG and PNG.
//!
//! A chart says on itself what it was measured on (fabric, profile, scale), where and when, and what its points and bars are: it
//! will be shown without the page that it was made for, and the software fabric is not a DGX Spark.
//!
//! Drawn by hand: a chart is a few lines, texts and ticks. plotters writes text into its bitmaps only with a font of the
//! system's or one that is shipped, and resvg needs fonts of the system's too; a node of a cluster may have none. The PNG's
//! letters come with `noto-sans-mono-bitmap`, which has no dependencies, and its lines are `png`'s, so nothing but the
//! `png` crate is added.

pub mod chart;
mod png;
mod svg;

use crate::date;
use crate::ranks::seats;
use anyhow::{Context, Result};
use chart::Chart;
use std::fs;
use std::path::Path;

/// The lines below a chart: what was measured on, where and when; then what its marks are.
pub fn captions(fabric: &str, marks: &str) -> Vec<String> {
    vec![format!("{fabric}; host {}; {}", seats::host(), date::today()), marks.to_owned()]
}

/// Writes a chart that has points as `folder`/`name`.svg and .png.
pub fn save(folder: &Path, name: &str, chart: &Chart) -> Result<()> {
    if !chart.has_points() {
        return Ok(());
    }
    let put = |ending: &str, bytes: Vec<u8>| {
        let path = folder.join(format!("{name}.{ending}"));
        fs::write(&path, bytes).with_context(|| format!("--plot {}", path.display()))
    };
    put("svg", svg::render(chart).into_bytes())?;
    put("png", png::render(chart).with_context(|| format!("draw {name}.png"))?)
}

/// Makes the folder, before the run, so that an unusable one is an error then and not after it.
pub fn prepare(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("--plot {}", folder.display()))
}
