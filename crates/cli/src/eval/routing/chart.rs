//! Line charts as SVG files, drawn by `plotters`. Letters stay text, so the viewer's fonts are used.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Pixels of one chart; the legend is on the right.
const SIZE: (u32, u32) = (760, 420);
const LEGEND: u32 = 190;

const INK: RGBColor = RGBColor(40, 40, 40);
const GRID: RGBColor = RGBColor(225, 225, 225);
const FONT: &str = "sans-serif";
/// Colours for the colour-blind (Okabe and Ito, 2008), in the order of the series.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];

/// In dark mode, light and dark are swapped and colours keep their hue.
const DARK: &str =
    "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.92) hue-rotate(180deg); } }</style>\n";

/// Lines over a common axis. Both axes begin at zero.
pub struct Chart {
    /// The file's name without `.svg`.
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

/// One image of all charts, two beside each other where there are several.
///
/// # Errors
/// Never in practice, for an image of this size.
pub fn svg(charts: &[Chart]) -> Result<String> {
    let columns = charts.len().clamp(1, 2);
    let rows = charts.len().div_ceil(columns).max(1);
    let mut file = String::new();
    {
        let root =
            SVGBackend::with_string(&mut file, (SIZE.0 * columns as u32, SIZE.1 * rows as u32)).into_drawing_area();
        let drawn = root.fill(&WHITE).and_then(|()| {
            charts.iter().zip(root.split_evenly((rows, columns))).try_for_each(|(chart, area)| chart.draw(&area))?;
            root.present()
        });
        drawn.map_err(|e| anyhow!("a chart cannot be drawn: {e}"))?;
    }
    // After the opening tag, which is the first that ends its line.
    let inside = file.find(">\n").map_or(file.len(), |at| at + 2);
    file.insert_str(inside, DARK);
    Ok(file)
}

type Drawn<'a> = std::result::Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

impl Chart {
    fn draw<'a>(&self, area: &DrawingArea<SVGBackend<'a>, Shift>) -> Drawn<'a> {
        let (plot, legend) = area.split_horizontally(SIZE.0 - LEGEND);
        let points = || self.series.iter().flat_map(|s| &s.points).filter(|p| p.0.is_finite() && p.1.is_finite());
        // A little beyond the last point, and never empty.
        let end = |most: f64| if most > 0.0 { most * 1.02 } else { 1.0 };
        let (x_end, y_end) =
            (end(points().map(|p| p.0).fold(0.0, f64::max)), end(points().map(|p| p.1).fold(0.0, f64::max)));
        // 1. the title, the grid and its numbers
        let mut chart = ChartBuilder::on(&plot)
            .caption(&self.title, (FONT, 20).into_font().style(FontStyle::Bold).color(&INK))
            .margin(10)
            .x_label_area_size(44)
            .y_label_area_size(58)
            .build_cartesian_2d(0.0..x_end, 0.0..y_end)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style((FONT, 15).into_font().color(&INK))
            .axis_desc_style((FONT, 16).into_font().color(&INK))
            .x_desc(&self.x)
            .y_desc(&self.y)
            .x_labels(10)
            .y_labels(8)
            .x_label_formatter(&|x| number(*x))
            .y_label_formatter(&|y| number(*y))
            .draw()?;
        for (i, series) in self.series.iter().enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            // 2. the lines
            let points = || series.points.iter().copied().filter(|p| p.0.is_finite() && p.1.is_finite());
            chart.draw_series(LineSeries::new(points(), colour.stroke_width(2)))?;
            chart.draw_series(points().map(|p| Circle::new(p, 3, colour.filled())))?;
            // 3. the legend, beside the plot, where it hides nothing
            let y = 46 + 20 * i as i32;
            legend.draw(&PathElement::new([(6, y), (28, y)], colour.stroke_width(2)))?;
            legend.draw(&Circle::new((17, y), 3, colour.filled()))?;
            let left = (FONT, 15).into_font().color(&INK).pos(Pos::new(HPos::Left, VPos::Center));
            legend.draw(&Text::new(series.name.as_str(), (36, y), left))?;
        }
        Ok(())
    }
}

/// A number of an axis, with as few digits as it needs.
fn number(value: f64) -> String {
    format!("{}", (value * 1e6).round() / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_an_axis_have_no_digits_to_spare() {
        assert_eq!([number(10.0), number(0.30000000000000004), number(0.0)], ["10", "0.3", "0"]);
    }

    fn one() -> Chart {
        let series = vec![Series { name: "a < b".into(), points: vec![(0.0, 0.0), (1.0, 1.0), (2.0, f64::NAN)] }];
        Chart { name: "c", title: "how many & when".into(), x: "tokens".into(), y: "share".into(), series }
    }

    #[test]
    fn a_chart_says_what_it_and_its_axes_and_lines_are() {
        let file = svg(&[one()]).unwrap();
        for word in ["how many &amp; when", "tokens", "share", "a &lt; b"] {
            assert!(file.contains(word), "{word}: {file}");
        }
        assert!(!file.contains("NaN"));
    }

    #[test]
    fn a_line_goes_from_its_first_to_its_last_point() {
        let file = svg(&[one()]).unwrap();
        let line = file.split("<polyline ").find(|l| l.contains("#0072B2")).unwrap();
        let points: Vec<(f64, f64)> = line
            .split_once("points=\"")
            .and_then(|(_, rest)| rest.split_once('"'))
            .map(|(points, _)| points.split_whitespace())
            .unwrap()
            .map(|p| p.split_once(',').unwrap())
            .map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()))
            .collect();
        assert_eq!(points.len(), 2);
        assert!(points[1].0 > points[0].0 + 300.0 && points[1].1 < points[0].1 - 200.0, "{points:?}");
    }

    #[test]
    fn an_image_has_room_for_all_of_its_charts() {
        let size = |n: usize| {
            let file = svg(&(0..n).map(|_| one()).collect::<Vec<_>>()).unwrap();
            let of = |name: &str| {
                file.split_once(&format!("{name}=\""))
                    .and_then(|(_, r)| r.split_once('"'))
                    .unwrap()
                    .0
                    .parse::<u32>()
                    .unwrap()
            };
            (of("width"), of("height"))
        };
        assert_eq!(size(1), SIZE);
        assert_eq!(size(3), (2 * SIZE.0, 2 * SIZE.1));
    }

    #[test]
    fn a_chart_turns_dark_with_its_reader() {
        let file = svg(&[one()]).unwrap();
        assert!(file.starts_with("<svg ") && file.trim_end().ends_with("</svg>"));
        assert!(file.find("prefers-color-scheme: dark").unwrap() < file.find("<rect").unwrap());
    }
}
