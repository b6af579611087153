//! Commands about facts: nodes, devices, links, readings, health and cordons.

use std::sync::Arc;

use crate::device::{CordonState, DeviceFacts, DeviceHealth, DeviceLink, NodeFacts};
use crate::ids::{DeviceId, GpuId, LeaseId, NodeId};
use crate::inventory::{DeviceSlot, LastReading};
use crate::lease::Lease;
use crate::limits;
use crate::outcome::{ApplyOutcome, CommandDenied, CommandReply, DeviceClosure, InUseReason, PoolEffect};
use crate::reading::{DeviceReading, ForeignLoad, ProcessAttribution, PromisedLoad, ReadingField};
use crate::row::{DeviceRow, NodeRow, PoolRow};
use crate::units::{Millis, Percent, Share};

use super::Pool;

impl Pool {
    pub(super) fn register_node(
        &mut self,
        facts: NodeFacts,
        devices: Vec<DeviceFacts>,
        numbers: &[GpuId],
        out: &mut ApplyOutcome,
    ) -> CommandReply {
        let (node, changed) = self.inventory.upsert_node(facts);
        if changed {
            self.needs_pass = true;
            self.push_node_row(node, out);
        }
        let mut ids = Vec::with_capacity(devices.len());
        for (place, facts) in devices.into_iter().enumerate() {
            let device = self.upsert_device(node, facts, numbers.get(place).copied(), out);
            if !self.inventory.device(device).seen {
                self.change_device(device, out, |slot| slot.seen = true);
            }
            ids.push(device);
        }
        self.set_node_up(node, true, out);
        CommandReply::Node(node, ids)
    }

    pub(super) fn register_device(
        &mut self,
        node: NodeId,
        facts: DeviceFacts,
        number: GpuId,
        health: DeviceHealth,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        self.known_node(node)?;
        let device = self.upsert_device(node, facts, Some(number), out);
        let slot = self.inventory.device(device);
        if !slot.seen || slot.health != health {
            self.change_device(device, out, |slot| (slot.seen, slot.health) = (true, health));
        }
        Ok(CommandReply::Node(node, vec![device]))
    }

    fn upsert_device(
        &mut self,
        node: NodeId,
        facts: DeviceFacts,
        number: Option<GpuId>,
        out: &mut ApplyOutcome,
    ) -> DeviceId {
        let (device, changed) = self.inventory.upsert_device(node, facts, number);
        if changed {
            self.needs_pass = true;
            self.push_device_row(device, out);
        }
        device
    }

    pub(super) fn lose_node(&mut self, node: NodeId, out: &mut ApplyOutcome) -> Result<CommandReply, CommandDenied> {
        self.known_node(node)?;
        self.set_node_up(node, false, out);
        Ok(CommandReply::Done)
    }

    fn set_node_up(&mut self, node: NodeId, up: bool, out: &mut ApplyOutcome) {
        if self.inventory.node(node).up == up {
            return;
        }
        self.needs_pass |= up;
        self.inventory.update_node(node, |slot| slot.up = up);
        for device in self.inventory.node(node).devices.clone() {
            self.change_device(device, out, |slot| slot.node_up = up);
        }
    }

    pub(super) fn forget_device(
        &mut self,
        device: DeviceId,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        self.known_device(device)?;
        let slot = self.inventory.device(device);
        let is_gone = !slot.node_up || !slot.seen || slot.health == DeviceHealth::Lost;
        let in_use = slot.leases.first().map(|lease| self.in_use_reason(*lease));
        if let Some(why) = in_use.or((!is_gone).then_some(InUseReason::Present)) {
            return Err(CommandDenied::DeviceInUse { device, why });
        }
        let node = slot.node;
        let links = self.inventory.node(node).links.len();
        self.remove_device(device, out);
        if self.inventory.node(node).links.len() != links {
            self.push_node_row(node, out);
        }
        Ok(CommandReply::Done)
    }

    pub(super) fn forget_node(&mut self, node: NodeId, out: &mut ApplyOutcome) -> Result<CommandReply, CommandDenied> {
        self.known_node(node)?;
        let slot = self.inventory.node(node);
        let holds = |lease: &&Lease| lease.node == Some(node) && (lease.state.is_granted() || lease.draining);
        let in_use = self.leases().find(holds).map(|lease| self.in_use_reason(lease.id));
        if let Some(why) = in_use.or(slot.up.then_some(InUseReason::Present)) {
            return Err(CommandDenied::NodeInUse { node, why });
        }
        for device in slot.devices.clone() {
            self.remove_device(device, out);
        }
        self.inventory.forget_node(node);
        out.rows.push(PoolRow::ForgetNode(node));
        Ok(CommandReply::Done)
    }

    fn remove_device(&mut self, device: DeviceId, out: &mut ApplyOutcome) {
        self.inventory.forget_device(device);
        // A new device may reuse the number, and that device was not the last one used.
        if self.counters.last_device == Some(device) {
            self.counters.last_device = None;
        }
        // A request that could have used the device may now claim less.
        self.needs_pass = true;
        out.rows.push(PoolRow::ForgetDevice(device));
    }

    fn in_use_reason(&self, lease: LeaseId) -> InUseReason {
        match self.leases.get(&lease) {
            Some(known) if known.quarantined => InUseReason::Quarantined(lease),
            Some(known) if known.draining => InUseReason::Draining(lease),
            _ => InUseReason::Held(lease),
        }
    }

    pub(super) fn set_links(
        &mut self,
        node: NodeId,
        links: Vec<DeviceLink>,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        self.known_node(node)?;
        if self.inventory.node(node).links != links {
            self.inventory.set_links(node, links);
            self.push_node_row(node, out);
        }
        Ok(CommandReply::Done)
    }

    pub(super) fn set_health(
        &mut self,
        device: DeviceId,
        health: DeviceHealth,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        self.known_device(device)?;
        if self.inventory.device(device).health != health {
            self.change_device(device, out, |slot| slot.health = health);
        }
        Ok(CommandReply::Done)
    }

    pub(super) fn set_cordon(
        &mut self,
        device: DeviceId,
        cordon: CordonState,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        self.known_device(device)?;
        if self.inventory.device(device).cordon != cordon {
            self.change_device(device, out, |slot| slot.cordon = cordon);
            self.push_device_row(device, out);
        }
        Ok(CommandReply::Done)
    }

    pub(super) fn drain_device(
        &mut self,
        device: DeviceId,
        grace: Millis,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        self.set_cordon(device, CordonState::Cordoned, out)?;
        for lease in self.inventory.device(device).leases.clone() {
            // Fails only for an ended lease, which drains anyway.
            let _ended_already = self.revoke_lease(lease, grace, None, out);
        }
        Ok(CommandReply::Done)
    }

    pub(super) fn observe_device(
        &mut self,
        device: DeviceId,
        reading: &DeviceReading,
        out: &mut ApplyOutcome,
    ) -> Result<CommandReply, CommandDenied> {
        self.known_device(device)?;
        if self.inventory.device(device).observed.is_some_and(|observed| reading.at < observed.at) {
            return Ok(CommandReply::Done);
        }
        self.free_drained_leases(device, reading, out);
        let foreign = self.foreign_load_after(device, reading);
        self.needs_pass = self.needs_pass || self.may_unblock_waiters(self.inventory.device(device), foreign);
        self.change_device(device, out, |slot| {
            slot.observed = Some(LastReading {
                at: reading.at,
                memory_used: reading.memory_used,
                utilization: reading.utilization,
                temperature_c: reading.temperature_c,
            });
            slot.foreign = foreign;
            match reading.temperature_c {
                ReadingField::Value(temperature) => slot.hot = temperature > limits::MAX_TEMPERATURE_C,
                ReadingField::Unsupported => slot.hot = false,
                // Keep the last known value.
                ReadingField::Failed => {}
            }
        });
        Ok(CommandReply::Done)
    }

    /// Whether a waiting request may start once the device has this foreign load.
    ///
    /// If a request fits in the device's free share, thresholds and device memory decide. The load of a full device
    /// matters in two ways: a request claims the hosts of devices below its thresholds, and a shorter lease may pass
    /// the request if it ends before such a device is certain to be free.
    fn may_unblock_waiters(&self, slot: &DeviceSlot, foreign: Option<ForeignLoad>) -> bool {
        let needs = &self.waiting_needs;
        let is_free = needs.fit_free_share(slot.free_share());
        if is_free && needs.have_thresholds() && slot.is_stale(self.stale_before()) {
            return true;
        }
        if foreign == slot.foreign {
            return false;
        }
        let memory = |foreign: Option<ForeignLoad>| foreign.and_then(|foreign| foreign.memory).unwrap_or_default();
        if is_free && needs.include_memory() && memory(foreign) < memory(slot.foreign) {
            return true;
        }
        if !needs.have_thresholds() {
            return false;
        }
        let matters = is_free || needs.include_hosts() || (needs.gpu_optional > 0 && self.has_certain_release(slot));
        let levels = |foreign| slot.foreign_levels(foreign);
        matters && needs.has_threshold_between(levels(slot.foreign), levels(foreign))
    }

    fn has_certain_release(&self, slot: &DeviceSlot) -> bool {
        let ends = |lease: &LeaseId| self.leases.get(lease).is_some_and(|lease| self.certain_end(lease).is_some());
        // Once a closed device opens, it offers the share that its leases leave free.
        self.waiting_needs.fit_free_share(Share::WHOLE.saturating_sub(slot.promised)) || slot.leases.iter().any(ends)
    }

    /// Returns the foreign load after this reading. The previous value stays, known or not, if a field failed, or if
    /// the reading or its attribution is older than the last change of leases and so shows a mixture.
    fn foreign_load_after(&self, device: DeviceId, reading: &DeviceReading) -> Option<ForeignLoad> {
        let slot = self.inventory.device(device);
        if slot.leases_changed_at.is_some_and(|changed| reading.at <= changed || !reading.includes_change_at(changed)) {
            return slot.foreign;
        }
        let mut foreign =
            ForeignLoad::from_reading(reading, slot.leases.iter().map(|lease| self.load_of(*lease, device)));
        if reading.memory_used == ReadingField::Failed {
            foreign.memory = slot.foreign?.memory;
        }
        if reading.utilization == ReadingField::Failed {
            foreign.utilization = slot.foreign?.utilization;
        }
        if let (None, Some(before)) = (&reading.processes, slot.foreign) {
            foreign.processes = before.processes;
        }
        Some(foreign)
    }

    fn load_of(&self, lease: LeaseId, device: DeviceId) -> PromisedLoad {
        let promises = self.leases.get(&lease).map(|lease| lease.promises.clone()).unwrap_or_default();
        let of_device = promises.iter().filter(|promise| promise.device == device);
        let (memory, share) = of_device.map(|promise| (promise.memory, promise.share)).next().unwrap_or_default();
        PromisedLoad { lease, memory, utilization: Percent::of_share(share) }
    }

    /// Frees the device of draining leases whose processes are all gone, as shown by a complete list of processes that
    /// was taken and attributed after the leases ended.
    fn free_drained_leases(&mut self, device: DeviceId, reading: &DeviceReading, out: &mut ApplyOutcome) {
        let Some(processes) = &reading.processes else { return };
        if processes.iter().any(|process| process.attribution == ProcessAttribution::Unknown) {
            return;
        }
        let slot = self.inventory.device(device);
        if !slot.leases.iter().any(|lease| self.leases.get(lease).is_some_and(|lease| lease.draining)) {
            return;
        }
        for id in slot.leases.clone() {
            let runs = processes.iter().any(|process| process.attribution == ProcessAttribution::Lease(id));
            let lease = self.lease_mut(id);
            if lease.draining
                && !runs
                && lease.ended_at.is_some_and(|ended| reading.at > ended && reading.includes_change_at(ended))
            {
                self.free_device(id, device, out);
            }
        }
    }

    /// Changes a device, reports whether that opens or closes the device, and requests a pass if its free share grows.
    pub(super) fn change_device(
        &mut self,
        device: DeviceId,
        out: &mut ApplyOutcome,
        change: impl FnOnce(&mut DeviceSlot),
    ) {
        let closed = |pool: &Self| -> (Option<DeviceClosure>, u32) {
            let slot = pool.inventory.device(device);
            (slot.closure(), slot.free_share().0)
        };
        let before = closed(self);
        self.inventory.update_device(device, change);
        let after = closed(self);
        if before.0 != after.0 {
            out.effects.push(PoolEffect::DeviceOpen { device, closed: after.0 });
        }
        self.needs_pass |= after.1 > before.1;
    }

    fn push_node_row(&self, node: NodeId, out: &mut ApplyOutcome) {
        let slot = self.inventory.node(node);
        out.rows.push(PoolRow::Node(NodeRow { node, facts: slot.facts.clone(), links: slot.links.clone() }));
    }

    fn push_device_row(&self, device: DeviceId, out: &mut ApplyOutcome) {
        let slot = self.inventory.device(device);
        out.rows.push(PoolRow::Device(DeviceRow {
            device,
            node: slot.node,
            gpu_id: slot.gpu_id,
            facts: Arc::clone(&slot.facts),
            cordon: slot.cordon,
        }));
    }
}
