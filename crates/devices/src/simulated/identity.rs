//! Numbers that are the same on every machine and after every restart: UUIDs, made-up pids, and what looks like noise.

/// A number that mixes what `parts` hold: FNV-1a over their bytes, each ended so that `ab`+`c` is not `a`+`bc`, then
/// the finish of SplitMix64, because FNV alone leaves similar texts with similar high bits.
pub(crate) fn mixed(seed: u64, parts: &[&[u8]]) -> u64 {
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let mut hash = 0xcbf2_9ce4_8422_2325 ^ finished(seed);
    for part in parts {
        let length = (part.len() as u64).to_le_bytes();
        for byte in part.iter().chain(&length) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(PRIME);
        }
    }
    finished(hash)
}

/// An NVIDIA UUID for what `parts` name: `GPU-…` or `MIG-…`.
pub(crate) fn nvidia_uuid(prefix: &str, seed: u64, parts: &[&[u8]]) -> String {
    let (high, low) = (mixed(seed, parts), mixed(!seed, parts));
    let groups = (high >> 32, (high >> 16) & 0xffff, high & 0xffff, low >> 48, low & 0xffff_ffff_ffff);
    format!("{prefix}-{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", groups.0, groups.1, groups.2, groups.3, groups.4)
}

/// An AMD unique id for what `parts` name.
pub(crate) fn amd_uuid(seed: u64, parts: &[&[u8]]) -> String {
    format!("GPU-{:016x}", mixed(seed, parts))
}

fn finished(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_stay_what_they_were_in_earlier_versions() {
        // A pool that ran on simulated devices finds them again after an upgrade.
        assert_eq!(
            nvidia_uuid("GPU", 0, &[b"", b"H100", &0u64.to_le_bytes()]),
            "GPU-5ee05ef4-cd1d-8e22-adf2-48a96d409afd"
        );
        assert_eq!(amd_uuid(7, &[b"node", b"MI300X", &3u64.to_le_bytes()]), "GPU-1f1fbb7844adae04");
    }

    #[test]
    fn where_one_part_ends_matters() {
        assert_ne!(mixed(0, &[b"ab", b"c"]), mixed(0, &[b"a", b"bc"]));
        assert_ne!(mixed(0, &[b"a"]), mixed(1, &[b"a"]));
    }
}
