//! Throughput and memory of the listeners, compared with `axum::serve` and the same routes.
//!
//! `listeners serve [FILE]` listens on two ports of loopback, the first with our listeners, the second with
//! `axum::serve`, and prints its own resident memory for every line on its standard input. `/body` serves the file as
//! JSON. `listeners wait ADDRESS N` opens N requests that get no response. Throughput:
//! `wrk -c64 -t1 http://ADDRESS/body`.

use std::io::{BufRead, Read, Write};
use std::net::TcpStream;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use gpupool_agent::internals::net::{ListenSpec, NetLimits, NetListeners, Shutdown, TcpBind, raise_open_files};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    raise_open_files();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve"] => run(vec![b'x'; 2048]),
        ["serve", file] => run(std::fs::read(file)?),
        ["wait", address, count] => wait(address, count.parse()?),
        _ => Err("usage: listeners serve [FILE] | listeners wait ADDRESS N".into()),
    }
}

fn run(body: Vec<u8>) -> Result<(), Box<dyn std::error::Error>> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(serve(body.into()))
}

async fn serve(body: bytes::Bytes) -> Result<(), Box<dyn std::error::Error>> {
    let answer = move || std::future::ready(([(CONTENT_TYPE, "application/json")], body.clone()));
    let routes = Router::new().route("/body", get(answer)).route("/wait", get(std::future::pending::<()>));
    let localhost = TcpBind { host: "127.0.0.1".to_owned(), port: 0 };
    let net =
        NetListeners::bind(ListenSpec { tcp: vec![localhost], limits: NetLimits::default(), ..ListenSpec::default() })
            .await?;
    let plain = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("ours {} axum {}", net.addresses()[0], plain.local_addr()?);
    tokio::spawn(axum::serve(plain, routes.clone()).into_future());
    std::thread::spawn(print_memory);
    net.serve(routes, Shutdown::new()).await;
    Ok(())
}

fn print_memory() {
    for _ in std::io::stdin().lock().lines() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        println!("{}", status.lines().find(|line| line.starts_with("VmRSS")).unwrap_or("VmRSS unknown"));
    }
}

fn wait(address: &str, count: usize) -> Result<(), Box<dyn std::error::Error>> {
    let mut open = Vec::with_capacity(count);
    for _ in 0..count {
        let mut stream = TcpStream::connect(address)?;
        let headers = "user-agent: gpupool/0.1\r\naccept: application/json\r\nauthorization: Bearer 0123456789abcdef";
        write!(stream, "GET /wait HTTP/1.1\r\nhost: {address}\r\n{headers}\r\n\r\n")?;
        open.push(stream);
    }
    println!("{count} requests wait; end of input closes them");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
