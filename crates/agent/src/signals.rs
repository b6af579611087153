//! Signals: SIGTERM and SIGINT stop the agent, SIGHUP makes it read its configuration again.

use gpupool_core::PoolCommand;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::authority::Authority;
use crate::identity::Caller;
use crate::net::{Shutdown, Tls};
use crate::serve::AgentSpec;
use crate::service_manager;

/// Listens until the agent ends. A second request to stop ends it at once.
pub async fn run(mut spec: AgentSpec, tls: Option<Tls>, authority: Authority, shutdown: Shutdown) {
    let listen = |kind| match signal(kind) {
        Ok(signal) => Some(signal),
        Err(error) => {
            tracing::error!(%error, "cannot listen for a signal");
            None
        }
    };
    let mut terminate = listen(SignalKind::terminate());
    let mut interrupt = listen(SignalKind::interrupt());
    let mut hangup = listen(SignalKind::hangup());
    loop {
        tokio::select! {
            () = heard(&mut terminate) => {}
            () = heard(&mut interrupt) => {}
            () = heard(&mut hangup) => {
                reload(&mut spec, tls.as_ref(), &authority).await;
                continue;
            }
        }
        if shutdown.has_begun() {
            tracing::warn!("told to stop twice: ending at once");
            (spec.finish_log)();
            std::process::exit(130);
        }
        tracing::info!("stopping: running answers are finished, leases stay");
        shutdown.begin();
    }
}

async fn heard(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

async fn reload(spec: &mut AgentSpec, tls: Option<&Tls>, authority: &Authority) {
    if let Some(tls) = tls {
        match tls.reload() {
            Ok(()) => tracing::info!("certificates read again"),
            Err(error) => tracing::error!(%error, "the certificates stay as they were"),
        }
    }
    let new = match (spec.reread)() {
        Ok(new) => new,
        Err(problems) => {
            tracing::error!("the configuration stays as it was: {problems}");
            return;
        }
    };
    let changes = spec.loaded.changes(&new);
    if !changes.need_restart.is_empty() {
        tracing::warn!(settings = changes.need_restart.join(", "), "changed settings that need a restart");
    }
    (spec.set_log_level)(new.config.server.log_level);
    if new.config.policies != spec.loaded.config.policies {
        // New rules are recorded as known only after they took effect: otherwise the next reload would see no change.
        let policies = Box::new(new.config.policies.clone());
        if let Err(refusal) = authority.ask(Caller::agent(), PoolCommand::SetPolicies { policies }).await {
            tracing::error!(%refusal, "the rules stay as they were; send SIGHUP again");
            return;
        }
    }
    if !changes.applied.is_empty() {
        tracing::info!(settings = changes.applied.join(", "), "changed settings that are in force now");
    }
    spec.loaded = new;
    service_manager::reloaded();
}
