//! Signals: SIGTERM and SIGINT stop the agent, SIGHUP makes it read its configuration again.

use gpupool_core::PoolCommand;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::authority::Authority;
use crate::identity::Caller;
use crate::limits::QUERY_PATIENCE;
use crate::net::{Shutdown, Tls};
use crate::serve::AgentSpec;
use crate::service_manager;

/// Listens until the agent ends. A second request to stop ends it at once.
pub(crate) async fn run(mut spec: AgentSpec, tls: Option<Tls>, authority: Authority, shutdown: Shutdown) {
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
            () = received(&mut terminate) => {}
            () = received(&mut interrupt) => {}
            () = received(&mut hangup) => {
                reload(&mut spec, tls.as_ref(), &authority).await;
                continue;
            }
        }
        if shutdown.has_begun() {
            tracing::warn!("second request to stop: ending at once");
            (spec.finish_log)();
            std::process::exit(130);
        }
        tracing::info!("stopping: open requests are finished, leases stay");
        shutdown.begin();
    }
}

async fn received(signal: &mut Option<Signal>) {
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
        let asked = authority.ask(Caller::agent(), PoolCommand::SetPolicies { policies });
        // Bounded: signals to stop wait meanwhile.
        match tokio::time::timeout(QUERY_PATIENCE, asked).await {
            Ok(Ok(_)) => {}
            Ok(Err(refusal)) => {
                tracing::error!(%refusal, "the rules stay as they were; send SIGHUP again");
                return;
            }
            Err(_) => {
                tracing::error!(
                    "the disk does not answer: the rules stay as they were until it does; send SIGHUP again"
                );
                return;
            }
        }
    }
    if !changes.applied.is_empty() {
        tracing::info!(settings = changes.applied.join(", "), "changed settings that are in force now");
    }
    spec.loaded = new;
    service_manager::reloaded();
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use gpupool_config::{ConfigInputs, HostContext, LoadedConfig, load_config};
    use gpupool_core::{Policies, Share};
    use gpupool_store::{MemoryDisk, MemoryFault};

    use super::*;
    use crate::authority::tests::start_in_memory;

    const DEADLINE: Duration = Duration::from_secs(60);

    fn configuration(max_share: u32) -> LoadedConfig {
        let machine = HostContext { root: false, host_name: "node".into(), state_home: Some("/nowhere".into()) };
        let mut loaded = load_config(&ConfigInputs::empty(machine)).unwrap();
        loaded.config.policies.fallback.max_share = Some(Share(max_share));
        loaded
    }

    /// Returns an agent whose rules differ from its current configuration.
    fn agent() -> AgentSpec {
        AgentSpec {
            loaded: configuration(500),
            reread: Box::new(|| Ok(configuration(600))),
            set_log_level: Box::new(|_| ()),
            finish_log: Box::new(|| ()),
        }
    }

    async fn rules_in_force(authority: &Authority) -> Policies {
        authority.query(|authority| authority.pool().policies().clone()).await.unwrap()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn rules_that_were_refused_take_effect_with_the_next_signal() {
        let disk = MemoryDisk::default();
        let ((authority, _thread), mut spec) = (start_in_memory(&disk), agent());
        disk.set_fault(Some(MemoryFault::Io));
        reload(&mut spec, None, &authority).await;
        assert!(spec.loaded == configuration(500), "the change is not taken for known");
        disk.set_fault(None);
        let start = Instant::now();
        while spec.loaded != configuration(600) {
            assert!(start.elapsed() < DEADLINE, "the rules are refused for ever");
            tokio::time::sleep(Duration::from_millis(50)).await;
            reload(&mut spec, None, &authority).await;
        }
        assert_eq!(rules_in_force(&authority).await, configuration(600).config.policies);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_disk_that_hangs_holds_up_no_later_signal() {
        let disk = MemoryDisk::default();
        let ((authority, _thread), mut spec) = (start_in_memory(&disk), agent());
        authority.query(|_| ()).await.unwrap();
        disk.set_fault(Some(MemoryFault::Hang));
        tokio::time::timeout(DEADLINE, reload(&mut spec, None, &authority)).await.expect("it waits for the disk");
        assert!(spec.loaded == configuration(500));
        disk.set_fault(None);
        reload(&mut spec, None, &authority).await;
        assert!(spec.loaded == configuration(600));
        assert_eq!(rules_in_force(&authority).await, configuration(600).config.policies);
    }
}
