//! Properties of simulated devices under random events.

use std::time::Duration;

use gpupool_core::{Bytes, Percent, Share};
use gpupool_devices::simulated::{
    DevicePosition, FaultTarget, ManualClock, SimulatedFault, SimulatedLoad, SimulatedSource, SimulationControl,
    SimulationSpec, model_names,
};
use gpupool_devices::{DeviceSource, SourceReading};
use proptest::prelude::*;

const NODE: &str = "2xH100,1xA30/2g.12gb/1g.6gb*2,1xMI300X/QPX,1xMI250X,1xGB10,1xT4";
const DEVICES: usize = 14;

/// An event on a node.
#[derive(Debug, Clone)]
enum SimulationEvent {
    Load { place: usize, holder: u64, share: u32, mib: u64 },
    Unload { place: usize, holder: u64 },
    Fault { place: usize, fault: SimulatedFault },
    Heal { place: usize },
}

fn events() -> impl Strategy<Value = Vec<(u64, SimulationEvent)>> {
    let fault = prop_oneof![
        (1u32..4, 0u64..1 << 24, 0u8..=100).prop_map(|(pid, memory_mib, utilization)| SimulatedFault::Squatter {
            pid,
            memory_mib,
            utilization
        }),
        Just(SimulatedFault::Lost),
        Just(SimulatedFault::Vanish),
        Just(SimulatedFault::StuckUtilization),
    ];
    let event = prop_oneof![
        4 => (0..DEVICES, 0u64..3, 0u32..=u32::MAX, 0u64..1 << 40)
            .prop_map(|(place, holder, share, mib)| SimulationEvent::Load { place, holder, share: share % 2000, mib: mib >> (share % 40) }),
        2 => (0..DEVICES, 0u64..3).prop_map(|(place, holder)| SimulationEvent::Unload { place, holder }),
        1 => (0..DEVICES, fault).prop_map(|(place, fault)| SimulationEvent::Fault { place, fault }),
        1 => (0..DEVICES).prop_map(|place| SimulationEvent::Heal { place }),
    ];
    prop::collection::vec((0u64..30_000, event), 1..24)
}

fn happen(control: &SimulationControl, event: &SimulationEvent) {
    match event {
        SimulationEvent::Load { place, holder, share, mib } => {
            let memory = Bytes(mib.saturating_mul(1 << 20));
            // A GPU in MIG mode refuses the load.
            let _ = control.set_load(
                DevicePosition(*place),
                *holder,
                SimulatedLoad { share: Share(*share), memory, ..SimulatedLoad::default() },
            );
        }
        SimulationEvent::Unload { place, holder } => control.clear_load(DevicePosition(*place), *holder),
        SimulationEvent::Fault { place, fault } => {
            control.inject_fault(&FaultTarget::Position(DevicePosition(*place)), fault).unwrap();
        }
        SimulationEvent::Heal { place } => {
            control.clear_faults(&FaultTarget::Position(DevicePosition(*place)), None).unwrap();
        }
    }
}

/// Plays events with `looks` extra readings during each, and returns the reading after each event.
fn play(events: &[(u64, SimulationEvent)], looks: u64) -> Vec<SourceReading> {
    let clock = ManualClock::default();
    let (mut source, control) = SimulatedSource::new(&SimulationSpec::parse(NODE).unwrap(), clock.ticking());
    let seen = |(millis, event): &(u64, SimulationEvent)| {
        happen(&control, event);
        for _ in 0..looks {
            clock.advance(Duration::from_millis(millis / (looks + 1)));
            source.read().unwrap();
        }
        clock.advance(Duration::from_millis(millis - looks * (millis / (looks + 1))));
        source.read().unwrap()
    };
    events.iter().map(seen).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn values_do_not_depend_on_the_number_of_readings(events in events(), looks in 1u64..9) {
        prop_assert_eq!(play(&events, 0), play(&events, looks));
    }

    #[test]
    fn no_device_uses_more_than_it_has(events in events()) {
        for snapshot in play(&events, 0) {
            for device in &snapshot.devices {
                let utilization = device.utilization.value().copied().unwrap_or(Percent(0));
                prop_assert!(utilization <= Percent::FULL);
                if let (Some(power), Some(limit)) = (device.power.value(), device.power_limit.value()) {
                    prop_assert!(power <= limit);
                }
                let (Some(&used), Some(&total)) = (device.memory.used.value(), device.memory.total.value()) else { continue };
                let reserved = device.memory.reserved.value().copied().unwrap_or_default();
                prop_assert!(used.saturating_add(reserved) <= total, "{used} of {total}");
                let processes = device.processes.value().unwrap().iter();
                let sum = processes.fold(Bytes::ZERO, |sum, p| sum.saturating_add(*p.memory.value().unwrap()));
                prop_assert!(sum <= used, "processes use {sum} of {used}");
            }
        }
    }

    #[test]
    fn a_load_never_shrinks_its_memory_while_it_runs(share in 0u32..=1000, mib in 0u64..100_000, steps in prop::collection::vec(0u64..2_000, 1..20)) {
        let clock = ManualClock::default();
        let (mut source, control) = SimulatedSource::new(&SimulationSpec::parse("H100").unwrap(), clock.ticking());
        control.set_load(DevicePosition(0), 1, SimulatedLoad { share: Share(share), memory: Bytes(mib << 20), ..SimulatedLoad::default() }).unwrap();
        let mut before = Bytes::ZERO;
        for step in steps {
            clock.advance(Duration::from_millis(step));
            let used = *source.read().unwrap().devices[0].memory.used.value().unwrap();
            prop_assert!(used >= before);
            before = used;
        }
    }

    #[test]
    fn devices_keep_their_identity_when_others_are_added(
        counts in prop::collection::vec((0..model_names().count(), 1usize..4), 1..5),
        other in 0..model_names().count(),
        node in "[a-c]{0,1}",
    ) {
        prop_assume!(counts.iter().all(|(model, _)| *model != other));
        let names: Vec<&str> = model_names().collect();
        let text: Vec<String> = counts.iter().map(|(model, count)| format!("{count}x{}", names[*model])).collect();
        let text = text.join(",");
        let longer = format!("{text},2x{}", names[other]);
        let of = |text: &str| {
            let (mut source, _) = SimulatedSource::new(&SimulationSpec::parse(text).unwrap().on_node(&node), || Duration::ZERO);
            let snapshot = source.read().unwrap();
            let known = |device: &gpupool_devices::DetectedDevice| (device.uuid.clone(), device.pci, device.minor, device.index);
            (snapshot.identities(), snapshot.devices.iter().map(known).collect::<Vec<_>>())
        };
        let (identities, known) = of(&text);
        prop_assert_eq!(&of(&text).1, &known);
        let mut distinct = identities.clone();
        distinct.sort();
        distinct.dedup();
        prop_assert_eq!(distinct.len(), identities.len(), "no two devices are the same");
        prop_assert_eq!(&of(&longer).1[..known.len()], &known[..]);
    }

    #[test]
    fn any_text_describes_devices_or_is_refused(text in "([0-9]{0,4}[xX*]?(H100|mi300x|RTX 4090|A30|[a-z0-9]{0,6})(/(CPX|1g.10gb|2g.12gb)([*][0-9]{1,3})?){0,3},?){0,4}") {
        if let Ok(spec) = SimulationSpec::parse(&text) {
            let (mut source, control) = SimulatedSource::new(&spec, || Duration::ZERO);
            prop_assert_eq!(source.read().unwrap().devices.len(), spec.device_count());
            prop_assert_eq!(control.devices().len(), spec.device_count());
        }
    }
}

#[test]
fn other_seeds_and_nodes_have_other_devices() {
    let uuid = |spec: SimulationSpec| {
        SimulatedSource::new(&spec, || Duration::ZERO).0.read().unwrap().devices[0].uuid.clone().unwrap()
    };
    let toml = |seed: u64| SimulationSpec::from_toml(&format!("seed = {seed}\n[[device]]\nmodel = \"H100\"")).unwrap();
    assert_ne!(uuid(toml(1)), uuid(toml(2)));
    assert_eq!(uuid(toml(0)), uuid(SimulationSpec::parse("H100").unwrap()));
    assert_ne!(uuid(toml(0).on_node("a")), uuid(toml(0).on_node("b")));
    assert_eq!(uuid(toml(0).on_node("a").on_node("b")), uuid(toml(0).on_node("a")), "a name that was given stays");
}
