//! Takes ReDoc's script out of the crate that carries it, makes it ask nobody for a picture, and compresses it: so it lies
//! in the binary as it is sent.

use std::io::Write;
use std::path::Path;
use std::{env, fs};

use aide::redoc::Redoc;
use flate2::Compression;
use flate2::write::GzEncoder;

/// The one thing ReDoc would fetch from its maker: the picture beside its name.
const REMOTE_PICTURE: &str = "https://cdn.redoc.ly/redoc/logo-mini.svg";
const NO_PICTURE: &str = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let page = Redoc::new("").html();
    let script = page.split_once("<script>").and_then(|(_, rest)| rest.rsplit_once("Redoc.init("));
    let (script, _) = script.expect("the page of ReDoc holds its script");
    assert!(script.contains(REMOTE_PICTURE), "ReDoc's script no longer names its picture: see what it fetches now");
    let script = script.replace(REMOTE_PICTURE, NO_PICTURE);
    let mut compressed = GzEncoder::new(Vec::new(), Compression::best());
    compressed.write_all(script.as_bytes()).expect("a list of bytes takes any");
    let compressed = compressed.finish().expect("a list of bytes takes any");
    let out = env::var_os("OUT_DIR").expect("cargo says where");
    fs::write(Path::new(&out).join("redoc.js.gz"), compressed).expect("the output directory can be written");
}
