//! A chart as PNG: two pixels for each unit of the chart.

use super::chart::{Anchor, Chart, Colour, HEIGHT, INK, Mark, WIDTH};
use anyhow::Result;
use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};

const SCALE: f64 = 2.0;
const COLUMNS: usize = (WIDTH * SCALE) as usize;
const ROWS: usize = (HEIGHT * SCALE) as usize;
const LETTERS: RasterHeight = RasterHeight::Size24;
/// Pixels of a dash, and from one to the next.
const DASH: (f64, f64) = (16.0, 26.0);

/// The whole file.
pub fn render(chart: &Chart) -> Result<Vec<u8>> {
    let mut picture = Picture(vec![255; COLUMNS * ROWS * 3]);
    for mark in chart.drawing() {
        picture.draw(&mark);
    }
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, COLUMNS as u32, ROWS as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header()?.write_image_data(&picture.0)?;
    Ok(file)
}

struct Picture(Vec<u8>);

impl Picture {
    fn draw(&mut self, mark: &Mark) {
        let pixel = |(x, y): (f64, f64)| (x * SCALE, y * SCALE);
        match mark {
            Mark::Stroke { points, colour, width, dashed } => {
                // Dashes go on over the corners.
                let mut way = 0.0;
                for pair in points.windows(2) {
                    let (from, to) = (pixel(pair[0]), pixel(pair[1]));
                    self.segment(from, to, width * SCALE, *colour, dashed.then_some(way));
                    way += (to.0 - from.0).hypot(to.1 - from.1);
                }
            }
            Mark::Disc { at, radius, colour } => {
                self.segment(pixel(*at), pixel(*at), radius * 2.0 * SCALE, *colour, None)
            }
            Mark::Text { at, text, anchor, upright } => self.text(pixel(*at), text, *anchor, *upright),
        }
    }

    /// A pixel is covered as far as it lies within half the width of the segment. `way` is how far the line has come before,
    /// where it has gaps.
    fn segment(&mut self, from: (f64, f64), to: (f64, f64), width: f64, colour: Colour, way: Option<f64>) {
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let length = dx.hypot(dy);
        let reach = width / 2.0 + 1.0;
        let range = |a: f64, b: f64, end: usize| {
            let (low, high) = ((a.min(b) - reach).max(0.0), (a.max(b) + reach).clamp(0.0, end as f64));
            low as usize..high as usize
        };
        for row in range(from.1, to.1, ROWS) {
            for column in range(from.0, to.0, COLUMNS) {
                let (x, y) = (column as f64 + 0.5 - from.0, row as f64 + 0.5 - from.1);
                let along = if length > 0.0 { ((x * dx + y * dy) / length).clamp(0.0, length) } else { 0.0 };
                if way.is_some_and(|way| (way + along) % DASH.1 > DASH.0) {
                    continue;
                }
                let (nearest_x, nearest_y) =
                    if length > 0.0 { (dx * along / length, dy * along / length) } else { (0.0, 0.0) };
                let distance = (x - nearest_x).hypot(y - nearest_y);
                self.blend(column, row, colour, (width / 2.0 + 0.5 - distance).clamp(0.0, 1.0));
            }
        }
    }

    fn text(&mut self, (x, y): (f64, f64), text: &str, anchor: Anchor, upright: bool) {
        let advance = get_raster_width(FontWeight::Regular, LETTERS);
        let length = (advance * text.chars().count()) as f64;
        let begin = match anchor {
            Anchor::Start => 0.0,
            Anchor::Middle => -length / 2.0,
            Anchor::End => -length,
        };
        for (number, letter) in text.chars().enumerate() {
            let letter = get_raster(letter, FontWeight::Regular, LETTERS);
            let Some(letter) = letter.or_else(|| get_raster('?', FontWeight::Regular, LETTERS)) else { continue };
            for (row, pixels) in letter.raster().iter().enumerate() {
                for (column, intensity) in pixels.iter().enumerate() {
                    let along = begin + (number * advance + column) as f64;
                    let across = row as f64 - letter.height() as f64 / 2.0;
                    let (at_x, at_y) = if upright { (x + across, y - along) } else { (x + along, y + across) };
                    if at_x >= 0.0 && at_y >= 0.0 {
                        self.blend(at_x as usize, at_y as usize, INK, f64::from(*intensity) / 255.0);
                    }
                }
            }
        }
    }

    fn blend(&mut self, column: usize, row: usize, colour: Colour, cover: f64) {
        if column >= COLUMNS || row >= ROWS || cover <= 0.0 {
            return;
        }
        let at = (row * COLUMNS + column) * 3;
        for (pixel, part) in self.0[at..at + 3].iter_mut().zip(colour) {
            *pixel = (f64::from(*pixel) * (1.0 - cover) + f64::from(part) * cover).round() as u8;
        }
    }
}
