"""Slurm: a run as one job, each of its processes a step of it.

job ──sbatch──▶ job: `distill run` ──▶ cluster: srun … ──▶ step, from both of its ends
                 └──sbatch──▶ job: `distill student`, an array on a preemptible partition
"""
