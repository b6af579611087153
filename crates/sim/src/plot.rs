//! Curves as an SVG that reads in light and dark.
