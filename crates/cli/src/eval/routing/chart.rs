//! Line charts as PNG files: axes with round numbers, labels, a legend, and a font that is part of the program.

use anyhow::Result;
use embedded_graphics::mono_font::iso_8859_1::{FONT_7X13, FONT_9X15_BOLD};
use embedded_graphics::mono_font::{MonoFont, MonoTextStyle};
use embedded_graphics::pixelcolor::Rgb888;
use embedded_graphics::prelude::*;
use embedded_graphics::primitives::{Circle, Line, PrimitiveStyle, Rectangle};
use embedded_graphics::text::{Alignment, Baseline, Text, TextStyleBuilder};

/// Pixels of one chart, and of what lies around its plot.
const SIZE: Size = Size::new(860, 440);
const LEFT: i32 = 76;
/// Of which the legend takes most.
const RIGHT: i32 = 190;
const TOP: i32 = 40;
const BOTTOM: i32 = 56;

const INK: Rgb888 = Rgb888::new(40, 40, 40);
const GRID: Rgb888 = Rgb888::new(225, 225, 225);
/// Colours that the colour-blind tell apart (Okabe and Ito, 2008), in the order of the series.
const COLOURS: [Rgb888; 7] = [
    Rgb888::new(0, 114, 178),
    Rgb888::new(213, 94, 0),
    Rgb888::new(0, 158, 115),
    Rgb888::new(204, 121, 167),
    Rgb888::new(230, 159, 0),
    Rgb888::new(86, 180, 233),
    Rgb888::new(0, 0, 0),
];

/// Lines over a common axis. Both axes begin at zero.
pub struct Chart {
    /// What a file of its own is called, without `.png`.
    pub name: &'static str,
    pub title: String,
    pub x: String,
    pub y: String,
    pub series: Vec<Series>,
}

pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// One PNG image of all charts, two beside each other where there are several.
///
/// # Errors
/// None that an image of this size could have.
pub fn png(charts: &[Chart]) -> Result<Vec<u8>> {
    let columns = charts.len().clamp(1, 2);
    let size = Size::new(SIZE.width * columns as u32, SIZE.height * charts.len().div_ceil(columns) as u32);
    let mut canvas = Canvas { size, pixels: vec![255; (size.width * size.height * 3) as usize] };
    for (i, chart) in charts.iter().enumerate() {
        let corner = Point::new((i % columns) as i32 * SIZE.width as i32, (i / columns) as i32 * SIZE.height as i32);
        chart.draw(&mut canvas, corner);
    }
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, size.width, size.height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header()?.write_image_data(&canvas.pixels)?;
    Ok(file)
}

/// `[height, width, 3]` bytes.
struct Canvas {
    size: Size,
    pixels: Vec<u8>,
}

impl OriginDimensions for Canvas {
    fn size(&self) -> Size {
        self.size
    }
}

impl DrawTarget for Canvas {
    type Color = Rgb888;
    type Error = std::convert::Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(&mut self, pixels: I) -> Result<(), Self::Error> {
        let bounds = self.bounding_box();
        for Pixel(point, colour) in pixels {
            if bounds.contains(point) {
                let at = (point.y as usize * self.size.width as usize + point.x as usize) * 3;
                self.pixels[at..at + 3].copy_from_slice(&[colour.r(), colour.g(), colour.b()]);
            }
        }
        Ok(())
    }
}

impl Canvas {
    fn line(&mut self, from: Point, to: Point, colour: Rgb888, width: u32) {
        let Ok(()) = Line::new(from, to).into_styled(PrimitiveStyle::with_stroke(colour, width)).draw(self);
    }

    fn text(&mut self, text: &str, at: Point, font: &MonoFont, alignment: Alignment) {
        let style = TextStyleBuilder::new().alignment(alignment).baseline(Baseline::Middle).build();
        let Ok(_) = Text::with_text_style(text, at, MonoTextStyle::new(font, INK), style).draw(self);
    }
}

impl Chart {
    fn draw(&self, canvas: &mut Canvas, corner: Point) {
        let plot = Rectangle::with_corners(
            corner + Point::new(LEFT, TOP),
            corner + Point::new(SIZE.width as i32 - RIGHT, SIZE.height as i32 - BOTTOM),
        );
        let (low, high) = (plot.top_left, plot.bottom_right().unwrap_or(plot.top_left));
        let points = || self.series.iter().flat_map(|s| &s.points).filter(|p| p.0.is_finite() && p.1.is_finite());
        let (x_step, x_end) = scale(points().map(|p| p.0).fold(0.0, f64::max));
        let (y_step, y_end) = scale(points().map(|p| p.1).fold(0.0, f64::max));
        let place = |(x, y): (f64, f64)| {
            let (width, height) = (f64::from(high.x - low.x), f64::from(high.y - low.y));
            Point::new(low.x + (x / x_end * width).round() as i32, high.y - (y / y_end * height).round() as i32)
        };
        // 1. the grid and its numbers
        for value in ticks(x_step, x_end) {
            let at = place((value, 0.0));
            canvas.line(Point::new(at.x, low.y), at, GRID, 1);
            canvas.text(&number(value, x_step), at + Point::new(0, 12), &FONT_7X13, Alignment::Center);
        }
        for value in ticks(y_step, y_end) {
            let at = place((0.0, value));
            canvas.line(at, Point::new(high.x, at.y), GRID, 1);
            canvas.text(&number(value, y_step), at - Point::new(8, 0), &FONT_7X13, Alignment::Right);
        }
        canvas.line(Point::new(low.x, low.y), Point::new(low.x, high.y), INK, 1);
        canvas.line(Point::new(low.x, high.y), high, INK, 1);
        // 2. what it is, and what the axes are: the vertical one's label lies on top of it, since this font does not turn
        let middle = low.x + (high.x - low.x) / 2;
        canvas.text(&self.title, corner + Point::new(LEFT, 11), &FONT_9X15_BOLD, Alignment::Left);
        canvas.text(&self.x, Point::new(middle, high.y + 34), &FONT_7X13, Alignment::Center);
        canvas.text(&self.y, corner + Point::new(LEFT - 60, 28), &FONT_7X13, Alignment::Left);
        // 3. the lines
        for (i, series) in self.series.iter().enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            let drawn: Vec<Point> = series.points.iter().map(|p| place(*p)).collect();
            drawn.windows(2).for_each(|w| canvas.line(w[0], w[1], colour, 2));
            drawn.iter().for_each(|p| mark(canvas, *p, colour));
        }
        // 4. the legend, beside the plot, where it hides nothing
        for (i, series) in self.series.iter().enumerate() {
            let at = Point::new(high.x + 16, low.y + 8 + i as i32 * 18);
            let colour = COLOURS[i % COLOURS.len()];
            canvas.line(at, at + Point::new(22, 0), colour, 2);
            mark(canvas, at + Point::new(11, 0), colour);
            canvas.text(&series.name, at + Point::new(30, 0), &FONT_7X13, Alignment::Left);
        }
    }
}

fn mark(canvas: &mut Canvas, at: Point, colour: Rgb888) {
    let Ok(()) = Circle::with_center(at, 5).into_styled(PrimitiveStyle::with_fill(colour)).draw(canvas);
}

/// A round step, and the end of an axis from zero that holds `most` in 4 to 10 of them.
fn scale(most: f64) -> (f64, f64) {
    let most = if most > 0.0 { most } else { 1.0 };
    let magnitude = 10f64.powf((most / 4.0).log10().floor());
    let step = [5.0, 2.0, 1.0].into_iter().map(|s| s * magnitude).find(|s| s * 4.0 <= most * 1.001);
    let step = step.unwrap_or(magnitude);
    (step, (most / step - 1e-9).ceil() * step)
}

fn ticks(step: f64, end: f64) -> impl Iterator<Item = f64> {
    (0..=(end / step).round() as usize).map(move |i| i as f64 * step)
}

/// With as many digits as the step needs.
fn number(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).max(0.0) as usize;
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!(scale(1.0), (0.2, 1.0));
        assert_eq!(scale(64.0), (10.0, 70.0));
        assert_eq!(scale(0.0), scale(1.0));
        assert_eq!(number(0.6000000001, 0.2), "0.6");
        assert_eq!(number(40.0, 10.0), "40");
        for most in [1e-3, 0.07, 0.99, 3.0, 17.0, 999.0, 1e9] {
            let (step, end) = scale(most);
            assert!(end >= most && (3.9..=10.1).contains(&(end / step)), "{most}: {step} {end}");
        }
    }

    #[test]
    fn a_line_is_drawn_where_its_points_are() {
        let series = vec![Series { name: "one".into(), points: vec![(0.0, 0.0), (1.0, 1.0)] }];
        let chart = Chart { name: "c", title: "title".into(), x: "x".into(), y: "y".into(), series };
        let file = png(&[chart]).unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(file)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (SIZE.width, SIZE.height));
        let pixel = |x: i32, y: i32| {
            let at = (y as usize * SIZE.width as usize + x as usize) * 3;
            Rgb888::new(pixels[at], pixels[at + 1], pixels[at + 2])
        };
        assert_eq!(pixel(LEFT + 1, SIZE.height as i32 - BOTTOM - 1), COLOURS[0]);
        assert_eq!(pixel(2, 2), Rgb888::WHITE);
    }
}
