"Turn numbers into tables, CSV files and pictures. No model is opened here."
