//! Comparison of a running pool with one that was killed and restored from its rows.

use gpupool_core::{
    ApplyOutcome, Bytes, DeviceId, DeviceReading, LeaseHolder, LeaseRow, LeaseState, Millis, Percent, Pool,
    PoolCommand, PoolEffect, PoolRow, ReadingField,
};

use super::model::ensure;
use super::session::{PoolSession, configured_workload};
use super::world::RandomWorld;

/// Runs a world up to a step, restores a second pool there, and takes the remaining steps with both.
pub fn check_same_decisions(world: &RandomWorld, cut: usize) -> Result<(), String> {
    let mut live = PoolSession::start(world)?;
    for step in &world.steps[..cut.min(world.steps.len())] {
        live.step(step)?;
    }
    settle(&mut live)?;
    let mut twin = live.restored(live.store.rows())?;
    let all_rows: Vec<_> = live.log.iter().flat_map(|logged| logged.outcome.rows.clone()).collect();
    let from_all_rows = live.restored(all_rows)?;
    ensure!(
        leases(&twin) == leases(&from_all_rows),
        "rule 2: a store that keeps the last rows only restores another pool"
    );
    ensure!(leases(&twin) == leases(&live.pool), "rule 2: {:?} became {:?}", leases(&live.pool), leases(&twin));

    restore_facts(&live, &mut twin)?;
    live.lists_devices_on_return = true;
    let from = live.log.len();
    for command in renew_lifetimes(&live) {
        live.send(command)?;
    }
    for step in &world.steps[cut.min(world.steps.len())..] {
        live.step(step)?;
    }
    for logged in &live.log[from..] {
        let (reply, outcome) = twin.apply(logged.now, logged.command.clone());
        twin.check_invariants()?;
        let same = reply == logged.reply && outcome.effects == logged.outcome.effects;
        ensure!(same, "rule 2: the restored pool replies {reply:?}, {outcome:?}\nbut the live one {logged:?}");
        let (live_rows, twin_rows) = (rows_of_facts(&logged.outcome), rows_of_facts(&outcome));
        ensure!(live_rows == twin_rows, "rule 2: the restored pool keeps {twin_rows:?}\nnot {live_rows:?}");
    }
    ensure!(leases(&twin) == leases(&live.pool), "rule 2: the pools parted");
    Ok(())
}

fn leases(pool: &Pool) -> Vec<LeaseRow> {
    pool.leases().map(|lease| lease.row().clone()).collect()
}

fn rows_of_facts(outcome: &ApplyOutcome) -> Vec<&PoolRow> {
    let is_fact = |row: &&PoolRow| !matches!(row, PoolRow::Counters(_) | PoolRow::Usage(_) | PoolRow::Workload(_));
    outcome.rows.iter().filter(is_fact).collect()
}

/// Reads every device and sees every node again until nothing changes: then one reading shows everything that the live
/// pool knows, and every waiter that can start has started.
fn settle(live: &mut PoolSession) -> Result<(), String> {
    for _ in 0..20 {
        live.clock = live.model.now.after(Millis(1));
        let from = live.log.len();
        // There may be no device and no node left.
        live.send(PoolCommand::Tick)?;
        for device in live.model.devices.keys().copied().collect::<Vec<_>>() {
            live.send(PoolCommand::Observe { device, reading: plain_reading(live, device) })?;
        }
        for number in nodes_up(live) {
            live.send(live.node_seen(number))?;
        }
        if live.log[from..].iter().all(|logged| logged.outcome == ApplyOutcome::default()) {
            return Ok(());
        }
    }
    Err("the live pool does not come to rest".to_owned())
}

/// Returns the known nodes that are up.
fn nodes_up(live: &PoolSession) -> Vec<usize> {
    (0..live.nodes.len()).filter(|number| live.node_id(*number).is_some_and(|id| live.model.nodes[&id].up)).collect()
}

/// Returns the last reading of a device, without failed fields and missing lists: those keep values of earlier
/// readings, which rows do not contain.
fn plain_reading(live: &PoolSession, device: DeviceId) -> DeviceReading {
    let last = live.model.devices[&device].reading.clone();
    let mut reading = last.unwrap_or_else(|| DeviceReading::idle(live.clock));
    reading.at = live.clock;
    reading.leases_as_of = None;
    if reading.memory_used == ReadingField::Failed {
        reading.memory_used = ReadingField::Value(Bytes(0));
    }
    if reading.utilization == ReadingField::Failed {
        reading.utilization = ReadingField::Value(Percent(0));
    }
    if reading.temperature_c == ReadingField::Failed {
        reading.temperature_c = ReadingField::Value(30);
    }
    reading.processes.get_or_insert_default();
    reading
}

/// Sends a restored pool the facts that rows do not contain. Nothing may change, since the live pool knew them.
fn restore_facts(live: &PoolSession, twin: &mut Pool) -> Result<(), String> {
    let model = &live.model;
    let mut commands = vec![PoolCommand::SetWorkload { classes: configured_workload(model.configured_workload) }];
    for (id, device) in &model.devices {
        commands.push(PoolCommand::SetHealth { device: *id, health: device.health.clone() });
        let mut reading = plain_reading(live, *id);
        reading.at = model.now.after(Millis(1));
        commands.push(PoolCommand::Observe { device: *id, reading });
    }
    commands.extend(nodes_up(live).into_iter().map(|number| live.node_seen(number)));
    for command in commands {
        let (reply, outcome) = twin.apply(model.now, command.clone());
        twin.check_invariants()?;
        ensure!(reply.is_ok(), "rule 2: {command:?} is answered by {reply:?}");
        let quiet = outcome.effects.iter().all(|effect| matches!(effect, PoolEffect::DeviceOpen { .. }));
        ensure!(quiet, "rule 2: {command:?} makes the restored pool do what the live one did not: {outcome:?}");
    }
    Ok(())
}

/// Renews everything: a restored lease gets one full ttl and a restored waiter a full wait, so the live ones must too.
fn renew_lifetimes(live: &PoolSession) -> Vec<PoolCommand> {
    let mut commands: Vec<PoolCommand> = Vec::new();
    let later = live.model.now.after(Millis(1));
    for device in live.model.devices.keys() {
        let mut reading = plain_reading(live, *device);
        reading.at = later;
        commands.push(PoolCommand::Observe { device: *device, reading });
    }
    for entry in live.model.leases.values() {
        let (lease, Some(token)) = (entry.id, entry.token) else {
            commands.push(PoolCommand::Follow { lease: entry.id });
            continue;
        };
        if entry.state == LeaseState::Active {
            commands.push(match entry.has_holder {
                true => PoolCommand::Attach { lease, token, holder: LeaseHolder::Connection },
                false => PoolCommand::Renew { lease, token },
            });
        }
    }
    commands
}
