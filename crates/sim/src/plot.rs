//! Curves of unallocated GPU over arrivals, as an SVG.

use std::fmt::Write as _;

/// Named curve with a value for each percent of capacity that has arrived.
#[derive(Debug, Clone)]
pub struct PlotCurve {
    pub name: String,
    pub values: Vec<f64>,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 170.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 52.0;
/// Colours that are distinct for colour-blind readers (Okabe and Ito's set).
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7a7a", "#000000"];

/// Draws the curves from `from` percent of arrivals on, as a page.
pub fn render_svg(title: &str, curves: &[PlotCurve], from: usize) -> String {
    let last = curves.iter().map(|curve| curve.values.len().saturating_sub(1)).max().unwrap_or(0).max(from + 1);
    let shown = curves.iter().flat_map(|curve| curve.values.iter().skip(from));
    let most = shown.fold(1.0_f64, |most, value| most.max(*value)).mul_add(1.05, 0.0);
    let x = |percent: f64| LEFT + (percent - from as f64) / (last - from) as f64 * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - value / most * (HEIGHT - TOP - BOTTOM);

    let mut out = String::new();
    let mut line = |text: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{text}");
    };
    line(format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">"#
    ));
    line(format!(r##"<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>"##));
    line(format!(r#"<text x="{LEFT}" y="26" font-size="16">{}</text>"#, escaped(title)));
    for tick in ticks(most) {
        let at = y(tick);
        line(format!(r##"<line x1="{LEFT}" x2="{:.1}" y1="{at:.1}" y2="{at:.1}" stroke="#dddddd"/>"##, WIDTH - RIGHT));
        line(format!(r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{tick}%</text>"#, LEFT - 8.0, at + 4.0));
    }
    for percent in (from..=last).filter(|percent| percent % 10 == 0) {
        let at = x(percent as f64);
        let bottom = HEIGHT - BOTTOM;
        line(format!(r##"<line x1="{at:.1}" x2="{at:.1}" y1="{bottom}" y2="{:.1}" stroke="#888888"/>"##, bottom + 5.0));
        line(format!(r#"<text x="{at:.1}" y="{:.1}" text-anchor="middle">{percent}%</text>"#, bottom + 20.0));
    }
    line(format!(
        r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">GPU demand that has arrived, of capacity</text>"#,
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 12.0
    ));
    // Labels beside the ends of their curves, pushed apart if they would overlap.
    let mut ends: Vec<(usize, f64)> =
        curves.iter().enumerate().map(|(i, curve)| (i, curve.values.last().map_or(0.0, |value| y(*value)))).collect();
    ends.sort_by(|a, b| a.1.total_cmp(&b.1));
    for i in 1..ends.len() {
        ends[i].1 = ends[i].1.max(ends[i - 1].1 + 17.0);
    }
    for (number, label_y) in ends {
        let (curve, colour) = (&curves[number], COLOURS[number % COLOURS.len()]);
        let points: Vec<String> = (from..curve.values.len())
            .map(|percent| format!("{:.1},{:.1}", x(percent as f64), y(curve.values[percent])))
            .collect();
        line(format!(r#"<polyline fill="none" stroke="{colour}" stroke-width="2" points="{}"/>"#, points.join(" ")));
        line(format!(
            r#"<text x="{:.1}" y="{:.1}" fill="{colour}">{}</text>"#,
            WIDTH - RIGHT + 10.0,
            label_y + 4.0,
            escaped(&curve.name)
        ));
    }
    line("</svg>".to_owned());
    out
}

fn ticks(most: f64) -> Vec<f64> {
    let step = [1.0, 2.0, 5.0, 10.0, 20.0].into_iter().find(|step| most / step <= 8.0).unwrap_or(25.0);
    (0..=(most / step) as usize).map(|i| i as f64 * step).collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_curve_is_drawn_and_named() {
        let curve = |name: &str| PlotCurve {
            name: name.into(),
            values: (0..=130).map(|i| 100.0 - f64::from(i) * 0.7).collect(),
        };
        let drawn = render_svg("a < b", &[curve("fgd"), curve("first-fit")], 60);
        assert_eq!(drawn.matches("<polyline").count(), 2);
        assert!(drawn.contains(">fgd</text>") && drawn.contains("a &lt; b"));
        assert!(drawn.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn nothing_to_draw_is_an_empty_page() {
        assert!(render_svg("nothing", &[], 60).contains("</svg>"));
    }
}
