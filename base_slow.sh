. /work/bench/tests/env.sh; cd /work/wt/tests0; export PYTHONPATH=/work/wt/tests0/src:/work/bench/tests CPUPLUG=/work/bench/tests/slow0.txt
rm -f $CPUPLUG
/usr/bin/time -v pytest -p cpuplug -n 2 --dist worksteal -m "slow and not gpu" -q > /work/bench/tests/slow0.log 2>&1
