//! Findings about the files, the directory and the port a configuration names.

use super::Severity::{Error, Warning};
use super::facts::{Facts, FileFact, PortFact};
use super::{Finder, Finding};
use crate::load::Loaded;

pub(super) fn findings(loaded: &Loaded, facts: &Facts) -> Vec<Finding> {
    let mut finder = Finder::new(loaded);
    port(&mut finder, facts);
    files(&mut finder, facts);
    state_directory(&mut finder, facts);
    finder.found
}

fn port(finder: &mut Finder<'_>, facts: &Facts) {
    let server = &finder.loaded.config.server;
    let (host, port) = (&server.host, server.port);
    match &facts.port {
        PortFact::Unknown | PortFact::Free => {}
        PortFact::InUse { by } => {
            let by = by.as_deref().unwrap_or("a process of another user");
            let what = format!("Port {port} of {host} is in use by {by}.");
            let remedy =
                "Where that is the agent itself, all is well; else stop it or choose another port (0 for any).";
            finder.add(Warning, "port_in_use", "server.port", what, remedy);
        }
        PortFact::Refused(why) => {
            let what = format!("Nobody could listen on {host} port {port}: {why}.");
            let remedy = "Choose an address of this machine, and a port from 1024 on unless the agent runs as root.";
            finder.add(Error, "cannot_listen", "server.host", what, remedy);
        }
    }
}

fn files(finder: &mut Finder<'_>, facts: &Facts) {
    let named =
        [("server.tls_cert", &facts.tls_cert), ("server.tls_key", &facts.tls_key), ("client.ca_file", &facts.ca_file)];
    for (key, fact) in named {
        if let FileFact::Unreadable { path, why } = fact {
            let what = format!("{} cannot be read: {why}.", path.display());
            finder.add(Error, "file_unreadable", key, what, "Name a file that exists and that this user may read.");
        }
    }
    if let FileFact::Here { path, others_can_read: true } = &facts.tls_key {
        let what = format!("Every user can read the private key {}.", path.display());
        finder.add(Warning, "key_readable", "server.tls_key", what, format!("chmod 600 {}", path.display()));
    }
    let token_in_file = matches!(finder.loaded.origin_of("client.token"), crate::Origin::File { .. });
    if let (FileFact::Here { path, others_can_read: true }, true) = (&facts.config_file, token_in_file) {
        let what = format!("Every user can read {}, which holds a token.", path.display());
        finder.add(Warning, "token_readable", "client.token", what, format!("chmod 600 {}", path.display()));
    }
}

fn state_directory(finder: &mut Finder<'_>, facts: &Facts) {
    let path = finder.loaded.config.server.state_dir.display().to_string();
    if let Some(why) = &facts.state_dir.not_writable {
        let what = format!("The agent could not write its state to {path}: {why}.");
        let remedy = "Run the agent as a user who may, or set server.state_dir to a directory of this user's.";
        finder.add(Error, "state_dir_not_writable", "server.state_dir", what, remedy);
    }
    if let Some(kind) = facts.state_dir.network {
        let what =
            format!("{path} is on a network file system ({kind}), where locks and durable writes are not certain.");
        finder.add(Warning, "state_dir_on_network", "server.state_dir", what, "Choose a directory on a local disk.");
    }
}
