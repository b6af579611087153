//! Findings about who can reach the agent, and which servers a client asks.

use std::net::IpAddr;

use super::Severity::{Notice, Warning};
use super::{Finder, Finding};
use crate::load::Loaded;
use crate::problem::Origin;

pub(super) fn findings(loaded: &Loaded) -> Vec<Finding> {
    let mut finder = Finder::new(loaded);
    listening(&mut finder);
    asking(&mut finder);
    finder.found
}

fn listening(finder: &mut Finder<'_>) {
    let server = &finder.loaded.config.server;
    let host = &server.host;
    let (on_network, tls) = (!is_loopback(host), server.tls_cert.is_some());
    if host.parse::<IpAddr>().is_err()
        && host != "localhost"
        && matches!(finder.loaded.origin_of("server.host"), Origin::Environment { .. })
    {
        let what = format!("HOST is {host:?}, a name. Some shells and conda set HOST to something that is no address.");
        finder.add(Notice, "host_is_a_name", "server.host", what, "Pass --host 127.0.0.1 or another address.");
    }
    if on_network && !tls && !server.allow_plain_http && !server.open {
        let what = format!(
            "The agent answers the network on {host} without TLS: anyone may read statistics, and tokens are refused, \
             so only users of this machine can take GPUs."
        );
        let remedy = "Set server.tls_cert and server.tls_key; on a trusted network --allow-plain-http or --open.";
        finder.add(Warning, "network_without_tls", "server.host", what, remedy);
    }
    if on_network && !tls && server.allow_plain_http && !server.open {
        let what = "Tokens travel over the network without TLS; whoever listens in can use them.";
        let remedy = "Set server.tls_cert and server.tls_key, and remove allow_plain_http.";
        finder.add(Warning, "plain_http_tokens", "server.allow_plain_http", what, remedy);
    }
    if server.open && tls {
        let what = "Anyone may take GPUs without a token (open), so TLS keeps readings private but nobody out.";
        finder.add(Warning, "open_with_tls", "server.open", what, "Remove open, and give clients tokens.");
    }
    if server.open && !on_network {
        let what = format!("open lets the network in, but the agent listens on {host} only.");
        finder.add(Notice, "open_on_loopback", "server.open", what, "Remove open, or set server.host.");
    }
}

fn asking(finder: &mut Finder<'_>) {
    let loaded = finder.loaded;
    let client = &loaded.config.client;
    let servers = loaded.servers();
    let plain = |url: &&String| url.strip_prefix("http://").is_some_and(|rest| !is_loopback(host_of(rest)));
    if let (Some(_), Some(url)) = (&client.token, servers.urls.iter().find(plain)) {
        let what = format!("The token would travel to {url} without TLS.");
        let remedy = "Use https://; servers refuse tokens over plain HTTP unless they were told to accept them.";
        finder.add(Warning, "token_without_tls", "client.token", what, remedy);
    }
    if client.endpoint.is_some() && !client.endpoints.is_empty() {
        let what = format!("Both client.endpoint and client.endpoints are set; asked is {}.", servers.urls.join(", "));
        finder.add(Notice, "endpoint_twice", "client.endpoint", what, "Keep one of them.");
    }
    for (key, threshold) in [
        ("client.memory_threshold_percent", client.memory_threshold_percent),
        ("client.utilization_threshold_percent", client.utilization_threshold_percent),
    ] {
        if threshold.0 == 0 {
            let what =
                "Available means strictly below the threshold, and nothing is below 0 %: no GPU would be available.";
            finder.add(Warning, "threshold_zero", key, what, "Set it above 0; 80 and 90 are usual.");
        }
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The host of what follows the scheme in a tidied URL.
fn host_of(rest: &str) -> &str {
    if let Some((address, _)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return address;
    }
    rest.split([':', '/']).next().unwrap_or(rest)
}
