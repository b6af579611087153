use gpupool_sim::*;
fn main() {
    let folder = trace::Folder::open(std::path::Path::new("../shared/traces")).unwrap();
    let args: Vec<String> = std::env::args().skip(1).collect();
    for t in folder.traces().unwrap() {
        if args.len() > 1 && !args[1].split(',').any(|x| x == t) {
            continue;
        }
        let mut sum = 0.0;
        let mut us = 0.0;
        let mut ref_ = 0.0;
        let mut n = 0.0;
        let mut rm = 0.0;
        for seed in folder.seeds(&t).unwrap() {
            let s: gpupool_core::Strategy = args[0].parse().unwrap();
            let w = if args.get(2).map(|s| s.as_str()) == Some("learned") {
                WorkloadSource::Learned
            } else {
                WorkloadSource::Known
            };
            if args.get(2).map(|s| s.as_str()) == Some("churn") {
                let r = churn::Churn {
                    folder: &folder,
                    trace: &t,
                    seed,
                    strategy: s,
                    workload: WorkloadSource::Known,
                    node_order: NodeOrder::Trace,
                    load: 1.0,
                    arrivals: 60000,
                }
                .run()
                .unwrap();
                sum += r.mean_allocated;
                us += r.us_per_decision;
                rm += r.refused_multi_gpu;
                n += 1.0;
                if n >= 2.0 {
                    break;
                }
                continue;
            }
            let r = replay::Replay {
                folder: &folder,
                trace: &t,
                seed,
                strategy: s,
                workload: w,
                node_order: NodeOrder::Trace,
            }
            .run()
            .unwrap();
            if args.len() < 2 {
                println!(
                    "{},{},{},{},{},{},{}",
                    t, s, seed, r.arrivals, r.failed, r.used_gpu_milli_end, r.used_gpu_milli_100
                );
            }
            sum += r.unallocated_100;
            us += r.us_per_decision;
            ref_ += r.us_per_refresh;
            n += 1.0;
            rm += r.refused_multi_gpu_95;
        }
        eprintln!("{t:12} {:.3} us {:.1} refresh {:.0} multi {:.2}", sum / n, us / n, ref_ / n, rm / n);
    }
}
