//! Who runs on a device, from whichever of its functions the library has.
//!
//! The entries of these functions have had three sizes, and drivers 535.43 to 535.86 changed the size without a new
//! name. So the room for them is marked first, and what was written over tells how large an entry is.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use gpupool_core::units::Bytes;
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t, nvmlReturn_t};

use super::code::{Answer, Code};
use super::library::{Handle, Library, list};
use crate::found::{Doing, Process};
use crate::limits;
use crate::told::Told;

/// What NVML says for memory it cannot tell.
const NOT_AVAILABLE: u64 = u64::MAX;
/// No pid, no size and no pair of instances looks like this.
const MARK: u64 = 0x5aa5_c33c_5aa5_c33c;
const FIRST_ROOM: usize = 64;

/// Room for the lists, kept between readings.
pub(super) struct Room(Vec<[u64; 4]>);

impl Default for Room {
    fn default() -> Self {
        Self(vec![[MARK; 4]; FIRST_ROOM])
    }
}

/// Every process on a device. A value only where the list is complete.
pub(super) fn running(library: &Library, device: Handle, room: &mut Room) -> Answer<Vec<Process>> {
    let computing = computing(library, device, room)?;
    let drawing = match drawing(library, device, room) {
        Ok(drawing) => drawing,
        // What cannot draw has no process that does.
        Err(code) if matches!(code.told::<()>(), Told::Unsupported(_)) => BTreeMap::new(),
        Err(code) => return Err(code),
    };
    Ok(joined(&computing, &drawing))
}

/// Device memory by pid.
type ByPid = BTreeMap<u32, u64>;

fn computing(library: &Library, device: Handle, room: &mut Room) -> Answer<ByPid> {
    let functions = library.functions();
    let newest = &functions.nvmlDeviceGetComputeRunningProcesses_v3;
    let newer = &functions.nvmlDeviceGetComputeRunningProcesses_v2;
    listed([newest, newer], &functions.nvmlDeviceGetComputeRunningProcesses, device, room)
}

fn drawing(library: &Library, device: Handle, room: &mut Room) -> Answer<ByPid> {
    let functions = library.functions();
    let newest = &functions.nvmlDeviceGetGraphicsRunningProcesses_v3;
    let newer = &functions.nvmlDeviceGetGraphicsRunningProcesses_v2;
    listed([newest, newer], &functions.nvmlDeviceGetGraphicsRunningProcesses, device, room)
}

type Call<T> = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut T) -> nvmlReturn_t;

/// What the first function says that the library has and the driver does not refuse.
fn listed<E>(
    newer: [&Result<Call<nvmlProcessInfo_v2_t>, E>; 2],
    oldest: &Result<Call<nvmlProcessInfo_v1_t>, E>,
    device: Handle,
    room: &mut Room,
) -> Answer<ByPid> {
    for call in newer.into_iter().flatten() {
        match entries(*call, device, room) {
            Err(code) if code.wants_other_function() => {}
            answer => return answer,
        }
    }
    match oldest {
        Ok(call) => entries(*call, device, room),
        Err(_) => Err(Code::FUNCTION_NOT_FOUND),
    }
}

/// Asks until everything fits: processes start while they are counted.
fn entries<T>(call: Call<T>, device: Handle, room: &mut Room) -> Answer<ByPid> {
    loop {
        room.0.fill([MARK; 4]);
        match list(call, device, &mut room.0) {
            Ok(count) => return Ok(by_pid(room.0.as_flattened(), count as usize, size_of::<T>() / 8)),
            Err((Code::TOO_SMALL, wanted)) if room.0.len() < limits::PROCESSES => {
                let wanted = (wanted as usize).max(room.0.len()).saturating_mul(2).min(limits::PROCESSES);
                room.0.resize(wanted, [MARK; 4]);
            }
            Err((code, _)) => return Err(code),
        }
    }
}

/// Reads `count` entries; each is as many words as were written over for it, or else `usual`.
fn by_pid(words: &[u64], count: usize, usual: usize) -> ByPid {
    let written = words.iter().rposition(|word| *word != MARK).map_or(0, |last| last + 1);
    let even = count != 0 && written.is_multiple_of(count) && (2..=4).contains(&(written / count));
    let size = if even { written / count } else { usual.clamp(2, 4) };
    let mut found = ByPid::new();
    for entry in words.chunks_exact(size).take(count) {
        let memory = entry[1];
        // The first half of the word is the pid, the rest fills it up.
        let [a, b, c, d, ..] = entry[0].to_ne_bytes();
        let sum = found.entry(u32::from_ne_bytes([a, b, c, d])).or_insert(0);
        // One process on several instances of a device is listed once for each.
        *sum =
            if memory == NOT_AVAILABLE || *sum == NOT_AVAILABLE { NOT_AVAILABLE } else { sum.saturating_add(memory) };
    }
    found
}

fn joined(computing: &ByPid, drawing: &ByPid) -> Vec<Process> {
    let only_drawing = drawing.iter().filter(|(pid, _)| !computing.contains_key(pid));
    let process = |(&pid, &memory): (&u32, &u64)| Process {
        pid,
        doing: match (computing.contains_key(&pid), drawing.contains_key(&pid)) {
            (true, true) => Doing::Both,
            (true, false) => Doing::Compute,
            _ => Doing::Graphics,
        },
        memory: match memory {
            NOT_AVAILABLE => Told::Unsupported("the driver does not tell".into()),
            memory => Told::Value(Bytes(memory)),
        },
        ..Process::default()
    };
    computing.iter().chain(only_drawing).map(process).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pid(pid: u32) -> u64 {
        let [a, b, c, d] = pid.to_ne_bytes();
        u64::from_ne_bytes([a, b, c, d, 0xc3, 0x3c, 0x5a, 0xa5])
    }

    #[test]
    fn entries_are_as_large_as_the_driver_writes_them_whatever_the_header_says() {
        let rest = |words: &[u64]| [words, &[MARK; 8]].concat();
        let expected = ByPid::from([(7, 100), (8, 200)]);
        for usual in [2, 3, 4] {
            assert_eq!(by_pid(&rest(&[pid(7), 100, pid(8), 200]), 2, usual), expected);
            assert_eq!(by_pid(&rest(&[pid(7), 100, 0, pid(8), 200, 0]), 2, usual), expected);
            assert_eq!(by_pid(&rest(&[pid(7), 100, 0, 0, pid(8), 200, 0, 0]), 2, usual), expected);
            assert!(by_pid(&rest(&[]), 0, usual).is_empty());
        }
    }

    #[test]
    fn a_process_that_computes_and_draws_is_one_process() {
        let both = joined(&ByPid::from([(7, 100), (9, NOT_AVAILABLE)]), &ByPid::from([(7, 90), (8, 5)]));
        let told: Vec<_> = both.iter().map(|process| (process.pid, process.doing, process.memory.value())).collect();
        assert_eq!(
            told,
            [(7, Doing::Both, Some(&Bytes(100))), (9, Doing::Compute, None), (8, Doing::Graphics, Some(&Bytes(5)))]
        );
    }

    #[test]
    fn a_process_on_two_instances_uses_the_memory_of_both() {
        let words = [pid(7), 100, 0, pid(7), 50, 1, pid(8), NOT_AVAILABLE, 0, pid(8), 1, 1, MARK];
        assert_eq!(by_pid(&words, 4, 3), ByPid::from([(7, 150), (8, NOT_AVAILABLE)]));
    }
}
